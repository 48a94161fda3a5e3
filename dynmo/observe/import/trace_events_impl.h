// SPDX-License-Identifier: Apache-2.0
#pragma once

// The events that the import of PyTorch traces reads, filtered from a trace's many events. A trace
// is read as a stream: memory holds some 30 bytes of each event of 230, and no text.

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/observe/import/trace_import.h"

namespace dynmo::observe {

struct TraceEvent {
  double start_us = 0;
  double duration_us = 0;
  std::optional<std::int64_t> number;  // sequence number, or correlation of a launch
  int thread = 0;                      // processes and threads of the trace, numbered
  int name = 0;                        // in TraceEvents::names; 0 is "", that of operations
  [[nodiscard]] double end_us() const { return start_us + duration_us; }
};

// The events of a trace that the import needs. Each list is sorted by start. If two events start at
// once, the longer one is first.
struct TraceEvents {
  std::vector<std::string> names;
  std::vector<TraceEvent> ranges;      // of the user, and of libraries
  std::vector<TraceEvent> operations;  // of the forward pass that have a sequence number
  std::vector<TraceEvent> nodes;       // of the backward pass, as the autograd engine runs them
  std::vector<TraceEvent> launches;    // of device kernels and copies
  std::unordered_map<std::int64_t, double> kernel_us;  // by correlation
  std::map<int, std::vector<double>> starts_us;        // of all operations, by thread; ascending

  [[nodiscard]] const std::string& name(const TraceEvent& event) const {
    return names[static_cast<std::size_t>(event.name)];
  }
};

// Selects and sorts the events of a trace. Returns kBadInput with file and JSON pointer.
[[nodiscard]] Expected<TraceEvents> parse_events(std::string_view text, std::string_view origin);
// Like parse_events(), for a file of any size.
[[nodiscard]] Expected<TraceEvents> read_events(const std::filesystem::path& path,
                                                const OpenTrace& open);

}  // namespace dynmo::observe
