// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/traffic_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "dynmo/core/files.h"

namespace dynmo::observe {
namespace {

constexpr std::string_view kFormat = "dynmo-traffic-1";
constexpr std::int64_t kMaxSum = std::int64_t{1} << 62;  // of all counts of a file

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

// Adds `count` to a sum of them; false where that would be above kMaxSum.
bool add_count(std::int64_t& sum, std::int64_t count) {
  if (count > kMaxSum - sum) return false;
  sum += count;
  return true;
}

bool add_counts(std::int64_t& sum, const TrafficRows& rows) {
  return std::ranges::all_of(rows, [&](const dynmo::TrafficRow& row) {
    return add_count(sum, row.count.messages) && add_count(sum, row.count.bytes.value);
  });
}

Expected<TrafficRows> read_rows(JsonObject& object, const std::string& key,
                                const std::set<int>& ranks) {
  std::vector<dynmo::TrafficRow> rows;
  for (JsonObject& one : object.objects(key)) {
    const auto rank_of = [&](const std::string& end) {
      const std::int32_t rank = small_of(one, end);
      if (!ranks.contains(rank)) {
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
  std::int64_t sum = 0;
  if (add_counts(sum, rows)) return sums_of(std::move(rows));
  object.fail(key, "adds up to more than 2^62 messages and bytes");
  return TrafficRows();
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
  std::set<int> known;
  for (JsonObject& rank : root.objects("ranks")) {
    const std::int32_t number = small_of(rank, "rank");
    if (!known.insert(number).second) {
      rank.fail("rank", fmt::format("is {}, as of another rank of this line", number));
    }
    interval.ranks.push_back(number);
    interval.nodes.push_back(small_of(rank, "node"));
    DYNMO_TRY(rank.finish());
  }
  DYNMO_ASSIGN(interval.measured, read_rows(root, "measured", known));
  DYNMO_ASSIGN(interval.predicted, read_rows(root, "predicted", known));
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

Expected<std::vector<TrafficInterval>> parse_traffic(std::string_view text,
                                                     std::string_view origin) {
  std::vector<TrafficInterval> intervals;
  std::int64_t sum = 0;
  int line = 0;
  for (std::size_t start = 0; start < text.size();) {
    const std::size_t newline = text.find('\n', start);
    const bool finished = newline != std::string_view::npos;
    const std::size_t end = finished ? newline : text.size();
    const std::string where = fmt::format("{}: line {}", origin, ++line);
    const auto json = parse_json(text.substr(start, end - start), where);
    start = end + 1;
    if (!json && !finished) break;
    if (!json) return json.error();
    DYNMO_ASSIGN(TrafficInterval interval, parse_traffic_interval(*json, where));
    const bool fits = add_count(sum, interval.steps) && add_counts(sum, interval.measured) &&
                      add_counts(sum, interval.predicted);
    if (!fits) {
      return make_error(ErrorCode::kBadInput,
                        "{}: with the lines before it adds up to more than 2^62 messages, bytes "
                        "and steps",
                        where);
    }
    intervals.push_back(std::move(interval));
  }
  return intervals;
}

Expected<std::vector<TrafficInterval>> read_traffic(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const std::string text, read_file(path));
  return parse_traffic(text, path.string());
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
