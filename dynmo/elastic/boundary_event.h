// SPDX-License-Identifier: Apache-2.0
#pragma once

// An event of an elastic run between two steps, as a value. The code that makes a change returns
// such values. The run prints their lines, logs them and answers clients.

#include <string>
#include <vector>

#include "dynmo/core/json.h"
#include "dynmo/elastic/control_messages.h"
#include "dynmo/process/line_server.h"

namespace dynmo::elastic {

struct BoundaryEvent {
  std::string kind = {};         // in the event log (observe/event_log.h); "" if not logged
  std::string line = {};         // for the user; "" if not printed
  Json json = nullptr;           // fields of the log entry after kind and step
  process::ClientId client = 0;  // client that gets `reply`; 0: none
  Reply reply = {};              // to the client
};
using BoundaryEvents = std::vector<BoundaryEvent>;

}  // namespace dynmo::elastic
