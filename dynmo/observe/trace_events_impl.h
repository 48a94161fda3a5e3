// SPDX-License-Identifier: Apache-2.0
#pragma once

// The events that the import of PyTorch traces reads, filtered from a trace's many events.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"

namespace dynmo::observe {

struct TraceEvent {
  std::string name;
  int thread = 0;  // processes and threads of the trace, numbered
  double start_us = 0;
  double duration_us = 0;
  std::optional<std::int64_t> number;  // sequence number, or correlation of a launch
  [[nodiscard]] double end_us() const { return start_us + duration_us; }
};

// Each list is sorted by start, the longer first.
struct TraceEvents {
  std::vector<TraceEvent> ranges;      // of the user
  std::vector<TraceEvent> operations;  // of the forward pass that have a sequence number
  std::vector<TraceEvent> nodes;       // of the backward pass, as the autograd engine runs them
  std::vector<TraceEvent> launches;    // of device kernels and copies
  std::map<std::int64_t, double> kernel_us;  // by correlation
};

// Selects and sorts the events of a trace. Returns kBadInput with file and JSON pointer.
[[nodiscard]] Expected<TraceEvents> sort_events(const Json& trace, std::string_view origin);

}  // namespace dynmo::observe
