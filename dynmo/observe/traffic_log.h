// SPDX-License-Identifier: Apache-2.0
#pragma once

// RUN/traffic.jsonl ("dynmo-traffic-1", docs/formats.md): the messages of a run between two plans,
// as its ranks counted them and as plan/traffic.h predicts them. A line an interval, written when
// it ends.

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/core/traffic.h"

namespace dynmo::observe {

// Steps under one plan, with the move that led to it. Ranks have their numbers for people.
struct TrafficInterval {
  Generation generation = 0;
  std::int64_t first_step = 0;
  std::int64_t steps = 0;
  std::vector<int> ranks;  // of the group, by world rank
  std::vector<int> nodes;  // of them; each replica has its own
  TrafficRows measured;
  TrafficRows predicted;  // without control, which nothing predicts
  friend bool operator==(const TrafficInterval&, const TrafficInterval&) = default;
};

[[nodiscard]] Json to_json(const TrafficInterval& interval);
// kBadInput with `origin` and JSON pointer.
[[nodiscard]] Expected<TrafficInterval> parse_traffic_interval(const Json& json,
                                                               std::string_view origin);

// Adds a line. kBadInput naming the path and the system's reason.
[[nodiscard]] Expected<void> append_traffic(const std::filesystem::path& path,
                                            const TrafficInterval& interval);
// All lines; a last one without its newline that cannot be read is passed over. Sums over all of
// them do not overflow. kBadInput with `origin`, the line and JSON pointer.
[[nodiscard]] Expected<std::vector<TrafficInterval>> parse_traffic(std::string_view text,
                                                                   std::string_view origin);
[[nodiscard]] Expected<std::vector<TrafficInterval>> read_traffic(
    const std::filesystem::path& path);

// World ranks become the numbers that they have for people.
void renumber(TrafficInterval& interval, const std::vector<int>& numbers);

// All intervals as one: all ranks that were ever there, each on the node where it was last.
[[nodiscard]] TrafficInterval sum_of(const std::vector<TrafficInterval>& intervals);

}  // namespace dynmo::observe
