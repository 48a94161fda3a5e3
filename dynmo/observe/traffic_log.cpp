// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/traffic_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "dynmo/core/fields.h"
#include "dynmo/core/files.h"
#include "dynmo/process/append_file.h"

namespace dynmo::observe {
namespace {

constexpr std::string_view kTrafficFormat = "dynmo-traffic-1";
constexpr std::int64_t kMaxSum = std::int64_t{1} << 62;  // of all counts of a file

constexpr Limits kRankNumber{.min = 0, .wanted = "the number of a rank"};

// Adds `count` to a sum. Returns false if the sum would exceed kMaxSum.
bool add_count(std::int64_t& sum, std::int64_t count) {
  if (count > kMaxSum - sum) return false;
  sum += count;
  return true;
}

bool add_counts(std::int64_t& sum, const TrafficRows& rows) {
  return std::ranges::all_of(rows, [&](const TrafficRow& row) {
    return add_count(sum, row.count.messages) && add_count(sum, row.count.bytes.value);
  });
}

void read_rows(JsonObject& object, const char* key, const std::set<int>& known, TrafficRows& rows) {
  FieldReader{object}(key, rows);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (const auto& [end, rank] : {std::pair("from", rows[i].from), std::pair("to", rows[i].to)}) {
      if (known.contains(rank.value)) continue;
      object.fail(fmt::format("{}/{}/{}", key, i, end),
                  fmt::format("is {}, wanted one of the ranks of this line", rank));
    }
  }
  std::int64_t sum = 0;
  if (!add_counts(sum, rows)) {
    return object.fail(key, "adds up to more than 2^62 messages and bytes");
  }
  rows = sums_of(std::move(rows));
}

}  // namespace

Json to_json(const TrafficInterval& interval) {
  Json ranks = Json::array();
  for (std::size_t r = 0; r < interval.ranks.size(); ++r) {
    ranks.push_back({{"rank", interval.ranks[r]}, {"node", interval.nodes[r]}});
  }
  return {{"format", kTrafficFormat},
          {"generation", interval.generation},
          {"first_step", interval.first_step},
          {"steps", interval.steps},
          {"ranks", std::move(ranks)},
          {"measured", traffic_json(interval.measured)},
          {"predicted", traffic_json(interval.predicted)}};
}

Expected<TrafficInterval> parse_traffic_interval(const Json& json, std::string_view origin) {
  JsonObject root(json, std::string(origin));
  FieldReader read(root);
  TrafficInterval interval;
  read.format(kTrafficFormat);
  read("generation", interval.generation, kCount);
  read("first_step", interval.first_step, kCount);
  read("steps", interval.steps, kCount);
  std::set<int> known;
  for (JsonObject& rank : root.objects("ranks")) {
    FieldReader inner(rank);
    inner("rank", interval.ranks.emplace_back(), kRankNumber);
    inner("node", interval.nodes.emplace_back(), kRankNumber);
    if (!known.insert(interval.ranks.back()).second) {
      rank.fail("rank",
                fmt::format("is {}, as of another rank of this line", interval.ranks.back()));
    }
    root.take_fault(rank);
  }
  read_rows(root, "measured", known, interval.measured);
  read_rows(root, "predicted", known, interval.predicted);
  DYNMO_TRY(root.finish());
  return interval;
}

Expected<void> append_traffic(const std::filesystem::path& path, const TrafficInterval& interval) {
  using File = process::LineFile;
  DYNMO_ASSIGN(File file, File::open(path, File::Start::kAppend));
  return file.append(to_json(interval).dump() + "\n");
}

Expected<std::vector<TrafficInterval>> parse_traffic(std::string_view text,
                                                     std::string_view origin) {
  std::vector<TrafficInterval> intervals;
  std::int64_t sum = 0;
  const auto add = [&](const Json& json, const std::string& where) -> Expected<void> {
    DYNMO_ASSIGN(TrafficInterval interval, parse_traffic_interval(json, where));
    const bool fits = add_count(sum, interval.steps) && add_counts(sum, interval.measured) &&
                      add_counts(sum, interval.predicted);
    if (!fits) {
      return make_error(ErrorCode::kBadInput,
                        "{}: with the lines before it adds up to more than 2^62 messages, bytes "
                        "and steps",
                        where);
    }
    intervals.push_back(std::move(interval));
    return {};
  };
  DYNMO_TRY(visit_json_lines(text, origin, add));
  return intervals;
}

Expected<std::vector<TrafficInterval>> read_traffic(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const std::string text, read_file(path));
  return parse_traffic(text, path.string());
}

void renumber(TrafficInterval& interval, const std::vector<int>& numbers) {
  for (int& rank : interval.ranks) rank = numbers[static_cast<std::size_t>(rank)];
  for (TrafficRows* rows : {&interval.measured, &interval.predicted}) {
    for (TrafficRow& row : *rows) {
      row.from = WorldRank(numbers[row.from.index()]);
      row.to = WorldRank(numbers[row.to.index()]);
    }
    *rows = sums_of(std::move(*rows));
  }
}

TrafficInterval sum_of(const std::vector<TrafficInterval>& intervals) {
  TrafficInterval sum;
  std::map<int, int> nodes;
  std::vector<TrafficRow> measured;
  std::vector<TrafficRow> predicted;
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
