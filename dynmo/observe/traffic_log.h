// SPDX-License-Identifier: Apache-2.0
#pragma once

// RUN/traffic.jsonl ("dynmo-traffic-1", docs/formats.md) has the messages of a run between two
// plans. They are counted by its ranks, and predicted by plan/traffic.h. One line for each interval
// is written at its end.

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/core/traffic.h"

namespace dynmo::observe {

// Steps under one plan, with the move that led to it. `ranks` has the numbers that users see.
struct TrafficInterval {
  Generation generation = 0;
  std::int64_t first_step = 0;
  std::int64_t steps = 0;
  std::vector<int> ranks;  // of the group, by world rank
  std::vector<int> nodes;  // of them; each replica has its own
  TrafficRows measured;
  TrafficRows predicted;  // without control, which is not predicted
  friend bool operator==(const TrafficInterval&, const TrafficInterval&) = default;
};

[[nodiscard]] Json to_json(const TrafficInterval& interval);
// Parses an interval. Returns kBadInput with `origin` and JSON pointer.
[[nodiscard]] Expected<TrafficInterval> parse_traffic_interval(const Json& json,
                                                               std::string_view origin);

// Adds a line, after removing a half-written one. Returns kBadInput with the path and the system's
// reason.
[[nodiscard]] Expected<void> append_traffic(const std::filesystem::path& path,
                                            const TrafficInterval& interval);
// Parses all lines. Ignores an unreadable last one without its newline. Sums over all of them do
// not overflow. Returns kBadInput with `origin`, the line and JSON pointer.
[[nodiscard]] Expected<std::vector<TrafficInterval>> parse_traffic(std::string_view text,
                                                                   std::string_view origin);
[[nodiscard]] Expected<std::vector<TrafficInterval>> read_traffic(
    const std::filesystem::path& path);

// Replaces world rank r by numbers[r], the number that users see.
void renumber(TrafficInterval& interval, const std::vector<int>& numbers);

// Returns all intervals as one. It has all ranks that ever existed, each on its last node.
[[nodiscard]] TrafficInterval sum_of(const std::vector<TrafficInterval>& intervals);

}  // namespace dynmo::observe
