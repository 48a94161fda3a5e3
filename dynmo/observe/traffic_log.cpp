// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/traffic_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "dynmo/core/files.h"

namespace dynmo::observe {
namespace {

constexpr std::string_view kFormat = "dynmo-traffic-1";

std::int64_t count_of(JsonObject& object, const std::string& key) {
  const std::int64_t value = object.integer(key);
  if (value < 0) object.fail(key, fmt::format("is {}, wanted 0 or more", value));
  return value;
}

std::int32_t small_of(JsonObject& object, const std::string& key) {
  const std::int64_t value = object.integer(key);
  if (value >= 0 && value <= std::numeric_limits<std::int32_t>::max()) {
    return static_cast<std::int32_t>(value);
  }
  object.fail(key, fmt::format("is {}, wanted the number of a rank", value));
  return 0;
}

Expected<TrafficRows> read_rows(JsonObject& object, const std::string& key,
                                const std::vector<int>& ranks) {
  std::vector<dynmo::TrafficRow> rows;
  for (JsonObject& one : object.objects(key)) {
    const auto rank_of = [&](const std::string& end) {
      const std::int32_t rank = small_of(one, end);
      if (std::ranges::find(ranks, rank) == ranks.end()) {
        one.fail(end, fmt::format("is {}, wanted one of the ranks of this line", rank));
      }
      return WorldRank(rank);
    };
    dynmo::TrafficRow row;
    row.from = rank_of("from");
    row.to = rank_of("to");
    const auto purpose = parse_purpose(one.string("purpose"));
    if (!purpose) one.fail("purpose", purpose.error().message);
    row.purpose = purpose.has_value() ? *purpose : Purpose::kControl;
    row.count.messages = count_of(one, "messages");
    row.count.bytes = one.bytes("bytes");
    DYNMO_TRY(one.finish());
    rows.push_back(row);
  }
  return sums_of(std::move(rows));
}

}  // namespace

Json to_json(const TrafficInterval& interval) {
  Json ranks = Json::array();
  for (std::size_t r = 0; r < interval.ranks.size(); ++r) {
    ranks.push_back({{"rank", interval.ranks[r]}, {"node", interval.nodes[r]}});
  }
  return {{"format", kFormat},
          {"generation", interval.generation},
          {"first_step", interval.first_step},
          {"steps", interval.steps},
          {"ranks", std::move(ranks)},
          {"measured", traffic_json(interval.measured)},
          {"predicted", traffic_json(interval.predicted)}};
}

Expected<TrafficInterval> parse_traffic_interval(const Json& json, std::string_view origin) {
  JsonObject root(json, std::string(origin));
  root.expect_format(std::string(kFormat));
  TrafficInterval interval;
  interval.generation = count_of(root, "generation");
  interval.first_step = count_of(root, "first_step");
  interval.steps = count_of(root, "steps");
  for (JsonObject& rank : root.objects("ranks")) {
    interval.ranks.push_back(small_of(rank, "rank"));
    interval.nodes.push_back(small_of(rank, "node"));
    DYNMO_TRY(rank.finish());
  }
  DYNMO_ASSIGN(interval.measured, read_rows(root, "measured", interval.ranks));
  DYNMO_ASSIGN(interval.predicted, read_rows(root, "predicted", interval.ranks));
  DYNMO_TRY(root.finish());
  return interval;
}

Expected<void> append_traffic(const std::filesystem::path& path, const TrafficInterval& interval) {
  errno = 0;
  std::ofstream file(path, std::ios::app);
  file << to_json(interval).dump() << '\n' << std::flush;
  if (file) return {};
  return make_error(ErrorCode::kBadInput, "cannot write '{}': {}", path.string(),
                    std::strerror(errno));
}

Expected<std::vector<TrafficInterval>> read_traffic(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const std::string text, read_file(path));
  std::vector<TrafficInterval> intervals;
  int line = 0;
  for (std::size_t start = 0; start < text.size();) {
    const std::size_t newline = text.find('\n', start);
    const bool finished = newline != std::string::npos;
    const std::size_t end = finished ? newline : text.size();
    const std::string origin = fmt::format("{}: line {}", path.string(), ++line);
    const auto json = parse_json(std::string_view(text).substr(start, end - start), origin);
    start = end + 1;
    if (!json && !finished) break;
    if (!json) return json.error();
    DYNMO_ASSIGN(TrafficInterval interval, parse_traffic_interval(*json, origin));
    intervals.push_back(std::move(interval));
  }
  return intervals;
}

void renumber(TrafficInterval& interval, const std::vector<int>& numbers) {
  for (int& rank : interval.ranks) rank = numbers[static_cast<std::size_t>(rank)];
  for (TrafficRows* rows : {&interval.measured, &interval.predicted}) {
    for (dynmo::TrafficRow& row : *rows) {
      row.from = WorldRank(numbers[row.from.index()]);
      row.to = WorldRank(numbers[row.to.index()]);
    }
    *rows = sums_of(std::move(*rows));
  }
}

TrafficInterval sum_of(const std::vector<TrafficInterval>& intervals) {
  TrafficInterval sum;
  std::map<int, int> nodes;
  std::vector<dynmo::TrafficRow> measured;
  std::vector<dynmo::TrafficRow> predicted;
  for (const TrafficInterval& one : intervals) {
    if (sum.ranks.empty() && sum.steps == 0) sum.first_step = one.first_step;
    sum.generation = one.generation;
    sum.steps += one.steps;
    for (std::size_t r = 0; r < one.ranks.size(); ++r) nodes[one.ranks[r]] = one.nodes[r];
    measured.insert(measured.end(), one.measured.begin(), one.measured.end());
    predicted.insert(predicted.end(), one.predicted.begin(), one.predicted.end());
  }
  for (const auto& [rank, node] : nodes) {
    sum.ranks.push_back(rank);
    sum.nodes.push_back(node);
  }
  sum.measured = sums_of(std::move(measured));
  sum.predicted = sums_of(std::move(predicted));
  return sum;
}

}  // namespace dynmo::observe
