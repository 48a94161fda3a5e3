// SPDX-License-Identifier: Apache-2.0
#pragma once

// Interprets a plan. It says how many ranks are enough, what limits the step, and which key would
// shorten it. Every answer is a replay of another plan for the same costs, with optimal cuts.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/propose.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::plan {

// Within this share two steps count as equal, and a change is not reported.
inline constexpr double kAdviceMargin = 0.02;

enum class StepLimit {
  kWork,      // the ranks compute nearly all the time
  kHead,      // the head, or a slice of it, is more than a rank's fair share
  kLayer,     // another layer is
  kCut,       // whole layers cannot be spread more evenly
  kBalancer,  // the optimal cut is better than that of the balancer in question
  kMemory,    // an even cut needs more memory than there is
  kFill,      // ranks wait for the first micro-batch and for the last gradients
  kMessages,  // ranks wait for messages and reductions
  kSlowRank,  // ranks wait for a slower one, though the work is even
};
[[nodiscard]] std::string_view name(StepLimit limit);

enum class AdviceKey {
  kHeadSlices,
  kSchedule,
  kMicroBatches,
  kMemory,
  kBalancer,
  kRanks,
  kMicroBatchSize,
  kInsideLatency,
  kInsideBandwidth,
  kBetweenLatency,
  kBetweenBandwidth,
  kNicBandwidth,
  kSpeed,  // of the slow ranks
};

struct KeyValue {
  AdviceKey key = AdviceKey::kHeadSlices;
  std::string value;
};

// Another value of a key, and the time of a step's micro-batches with it.
struct Remedy {
  AdviceKey key = AdviceKey::kHeadSlices;
  std::string value;
  double step_s = 0;
  std::optional<KeyValue> with = {};  // changed together with it
};

struct RankCount {
  int ranks = 0;
  double step_s = 0;
};

// The limit of a step, and a change that would shorten it. Times are means over the steps of the
// problem.
struct Advice {
  RankCount all;  // offered ranks
  StepLimit limit = StepLimit::kWork;
  double share = 0;   // of the ranks' time lost to the limit; of kWork: in which they compute
  std::string layer;  // of kHead and kLayer: the heaviest
  std::optional<Remedy> remedy;
  double best_s = 0;                // the shortest step of any number of ranks
  std::optional<RankCount> fewest;  // ranks whose step is within kAdviceMargin of the best
};

using ModelCosts = std::vector<cost::ModelCost>;

// A change that the caller can describe: the same tokens with other costs, links or speeds.
struct AdviceChange {
  KeyValue set;
  std::optional<KeyValue> with = {};
  ModelCosts models;
  cost::Cluster cluster;
  int micro_batches = 1;
};

struct AdviceProblem {
  ModelCosts models;  // one for each examined step
  const cost::Cluster& cluster;
  int micro_batches = 1;
  schedule::ScheduleKind schedule = schedule::ScheduleKind::k1F1B;
  ScheduleChoice schedules = ScheduleChoice::kAsGiven;  // kBest: the best schedule of all
  Recompute recompute = Recompute::kNone;               // of all plans that are made
  int stages_per_rank = 2;                              // of interleaved
  // The plans in question, one for each of `models`. None: the optimal cuts of all ranks.
  std::vector<Evaluation> plans = {};
  double head_room = 0;  // share of the ranks' memory not in `cluster`
  std::int64_t head_slices = 1;
  // Returns `models` with the head in `slices` slices. Empty if the head cannot be cut.
  std::function<Expected<ModelCosts>(std::int64_t slices)> sliced = {};
  // Returns what could help against messages or slow ranks, settings first.
  std::function<std::vector<AdviceChange>(StepLimit)> changes = {};
};

// Gives advice. Tries every number of ranks that perfect balance would allow, with the ranks that
// `pack` keeps first. If that is too much work, it bisects. Returns nullopt if no optimal cut fits
// the memory, or if a single replay would take seconds. Deterministic.
[[nodiscard]] std::optional<Advice> advise(const AdviceProblem& problem);

// Returns the costs with the head, the last layer, divided evenly into slices. Profiles have no
// better data, while formulas compute costs for the number of slices. Returns kBadInput if the last
// layer is not a whole head.
[[nodiscard]] Expected<cost::ModelCost> with_head_slices(cost::ModelCost model,
                                                         std::int64_t slices);

[[nodiscard]] std::string_view name(AdviceKey key);
// Returns the tokens that a rank computes in an hour, with `tokens` a step.
[[nodiscard]] double tokens_an_hour(const RankCount& count, double tokens);
// Returns the advice as JSON. `tokens` are those of a step; 0: not known.
[[nodiscard]] Json advice_json(const Advice& advice, double tokens);

}  // namespace dynmo::plan
