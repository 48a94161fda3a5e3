// SPDX-License-Identifier: Apache-2.0
// Traffic that is taken reads back as it was written, is drawn, and is a tensor whose entries add
// up to what was measured.
#include <numeric>

#include "dynmo/observe/traffic_log.h"
#include "dynmo/observe/traffic_picture.h"
#include "dynmo/tensor/features.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {
namespace {

constexpr std::size_t kMaxBytes = 4000;  // the seeds have less
constexpr std::size_t kMaxRanks = 8;     // of a drawing, which has all pairs

std::string text_of(const std::vector<observe::TrafficInterval>& intervals) {
  std::string text;
  for (const observe::TrafficInterval& interval : intervals) {
    text += observe::to_json(interval).dump() + '\n';
  }
  return text;
}

double measured_bytes(const observe::TrafficInterval& interval) {
  double sum = 0;
  for (const TrafficRow& row : interval.measured) {
    if (row.purpose != Purpose::kControl) sum += static_cast<double>(row.count.bytes.value);
  }
  return sum;
}

}  // namespace

Outcome run_target(std::string_view text) {
  text = text.substr(0, kMaxBytes);
  const auto intervals = observe::parse_traffic(text, "traffic.jsonl");
  if (!intervals) return refused(intervals.error());
  const auto again = observe::parse_traffic(text_of(*intervals), "again");
  DYNMO_CHECK(again.has_value() && *again == *intervals, "the same again");
  if (intervals->empty()) return Outcome::kRefused;
  const observe::TrafficInterval sum = observe::sum_of(*intervals);
  if (sum.ranks.size() <= kMaxRanks) {
    (void)observe::traffic_text(sum);
    DYNMO_CHECK(observe::traffic_svg(sum).ends_with("</svg>\n"), "a whole drawing");
  }
  DYNMO_CHECK(observe::traffic_csv(*intervals).ends_with('\n'), "a whole table");
  const tensor::SparseTensor tensor = observe::tensor_of(*intervals);
  const double all = std::accumulate(tensor.values.begin(), tensor.values.end(), 0.0);
  DYNMO_CHECK(std::abs(all - measured_bytes(sum)) <= 1e-9 * all, "{} bytes, got {}",
              measured_bytes(sum), all);
  const auto features = tensor::features_of(tensor);
  if (!features) return refused(features.error());
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  observe::TrafficInterval first{.generation = 1,
                                 .first_step = 10,
                                 .steps = 5,
                                 .ranks = {0, 1, 3},
                                 .nodes = {0, 1, 0},
                                 .measured = {},
                                 .predicted = {}};
  const auto row = [](int from, int to, Purpose purpose, std::int64_t bytes) {
    return TrafficRow{WorldRank(from), WorldRank(to), purpose, {2, Bytes{bytes}}};
  };
  first.measured = {row(0, 1, Purpose::kActivation, 1 << 20), row(1, 0, Purpose::kGradient, 4096),
                    row(1, 3, Purpose::kControl, 24)};
  first.predicted = {row(0, 1, Purpose::kActivation, 1 << 20)};
  observe::TrafficInterval second = first;
  second.generation = 2;
  second.ranks = {0, 1, 4};
  second.measured = {row(4, 0, Purpose::kReduction, 100)};
  second.predicted = {row(4, 0, Purpose::kMigration, 1)};
  return {text_of({first}), text_of({first, second}), text_of({second}) + "{"};
}

}  // namespace dynmo::fuzz
