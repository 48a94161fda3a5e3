// SPDX-License-Identifier: Apache-2.0
#pragma once

// Something that happened to an elastic run between two steps, as a value: who carries a change out
// returns such values, and the run prints their lines, logs them and answers clients.

#include <string>
#include <vector>

#include "dynmo/core/json.h"
#include "dynmo/elastic/control_messages.h"
#include "dynmo/process/line_server.h"

namespace dynmo::elastic {

struct BoundaryEvent {
  std::string kind = {};         // in the event log (observe/event_log.h); "": it is not logged
  std::string line = {};         // for people; "": nothing is printed
  Json json = nullptr;           // what the event log has beside kind and step
  process::ClientId client = 0;  // who is answered; 0: nobody
  Reply reply = {};              // to the client
};
using BoundaryEvents = std::vector<BoundaryEvent>;

}  // namespace dynmo::elastic
