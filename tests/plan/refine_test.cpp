// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/refine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/replayer_impl.h"
#include "dynmo/plan/simulated_optimum.h"
#include "tests/plan/cuts.h"
#include "tests/support/samples.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

double replay_s(const std::vector<int>& counts, const BalanceProblem& problem) {
  return evaluate(make_plan(counts, problem.schedule), problem)->step_time_s;
}

std::vector<int> even(const BalanceProblem& problem) {
  return *balance(Balancer::kUniform, problem);
}

// Layers of a millisecond, times what each has left.
cost::ModelCost model_of(const std::vector<double>& left) {
  cost::ModelCost model = equal_model(static_cast<int>(left.size()), 1e-3);
  for (std::size_t i = 0; i < left.size(); ++i) {
    model.layers[i].forward_s *= left[i];
    model.layers[i].backward_input_s *= left[i];
    model.layers[i].backward_weight_s *= left[i];
  }
  return model;
}

TEST(Refine, IsNeverSlowerThanAStartAndNearlyAsFastAsAllCuts) {
  int optimal = 0;
  int cases = 0;
  double lost = 0;
  for (std::uint64_t seed = 0; seed < samples(120U); ++seed) {
    Rng rng(mix_key({0x2EF1, seed}));
    const int ranks = pick(rng, 2, 6);
    const cost::ModelCost model = random_model(rng, pick(rng, ranks, 18));
    const cost::Cluster cluster = cost::equal_ranks(ranks);
    const auto kind =
        std::array{ScheduleKind::k1F1B, ScheduleKind::kGpipe, ScheduleKind::kZbH1}[seed % 3];
    const BalanceProblem problem{{model, cluster, pick(rng, 1, 16)}, kind};
    const std::vector<std::vector<int>> starts = {*balance(Balancer::kOptimal, problem),
                                                  even(problem)};
    const auto refined = refine(starts, problem);
    ASSERT_TRUE(refined) << refined.error().message << ", seed " << seed;
    const double time = replay_s(refined->counts, problem);
    for (const std::vector<int>& start : starts) {
      ASSERT_LE(time, replay_s(start, problem)) << "seed " << seed;
    }
    const auto best = simulated_optimum({model, cluster, problem.micro_batches}, kind);
    ASSERT_TRUE(best.has_value()) << best.error().message << ", seed " << seed;
    ASSERT_TRUE(best->has_value()) << "seed " << seed;
    ASSERT_GE(time, (*best)->step_time_s) << "seed " << seed << " " << schedule::name(kind);
    ++cases;
    optimal += time == (*best)->step_time_s ? 1 : 0;
    lost += time / (*best)->step_time_s - 1;
  }
  EXPECT_GE(optimal, cases * 9 / 10);
  EXPECT_LT(lost / cases, 0.002);
}

// Costs as a training with early exits had them in step 40: the cut with the least bottleneck takes
// longer than the one in force, as its uneven neighbours wait for each other.
TEST(Refine, FindsACutThatLevellingWorkDoesNot) {
  const cost::ModelCost model = model_of({0.09, 1.2, 1.27, 1.22, 1.8, 0.93, 0.96, 0.91, 1.37, 0.94,
                                          1.05, 0.89, 1.52, 0.76, 0.92, 0.77, 0.92, 0.33});
  const cost::Cluster cluster = cost::equal_ranks(8);
  const BalanceProblem problem{{model, cluster, 16}};
  const std::vector<std::vector<int>> starts = {*balance(Balancer::kOptimal, problem)};
  const auto refined = refine(starts, problem);
  ASSERT_TRUE(refined) << refined.error().message;
  EXPECT_LT(replay_s(refined->counts, problem), 0.97 * replay_s(starts[0], problem));
  EXPECT_EQ(replay_s(refined->counts, problem),
            (*simulated_optimum({model, cluster, 16}, ScheduleKind::k1F1B))->step_time_s);
}

TEST(Refine, KeepsTheMemoryOfEveryRank) {
  int without = 0;
  for (std::uint64_t seed = 0; seed < samples(100U); ++seed) {
    Rng rng(mix_key({0x2EF2, seed}));
    const int ranks = pick(rng, 2, 4);
    const cost::ModelCost model = whole_number_model(rng, pick(rng, 2 * ranks, 12));
    const cost::Cluster cluster = cost::equal_ranks(ranks, Bytes{pick(rng, 40, 300)});
    const BalanceProblem problem{{model, cluster, 2 * ranks}};
    const auto cut = balance(Balancer::kOptimal, problem);
    std::vector<std::vector<int>> starts = {even(problem)};
    if (cut) starts.push_back(*cut);
    const auto refined = refine(starts, problem);
    ASSERT_TRUE(refined) << refined.error().message << ", seed " << seed;
    if (refined->counts.empty()) {
      EXPECT_FALSE(cut.has_value()) << "seed " << seed;
      ++without;
      continue;
    }
    const auto replayed = evaluate(make_plan(refined->counts, problem.schedule),
                                   {model, cluster, problem.micro_batches});
    EXPECT_TRUE(fits_memory(replayed->result, cluster)) << "seed " << seed;
  }
  EXPECT_GT(without, 0);
}

// Attention takes four times as long as the layer beside it: moving one layer at a time does not
// lead from the cut with the least bottleneck to the best one, but from the even one it does.
TEST(Refine, StartsFromTheEvenCutToo) {
  const cost::ModelCost model = model_of(
      {0.02, 1.4, 0.6, 1.8, 0.6, 2.1, 0.6, 2.5, 0.5, 2.0, 0.5, 2.3, 0.6, 2.5, 0.5, 2.6, 0.6, 0.4});
  const cost::Cluster cluster = cost::equal_ranks(8);
  const BalanceProblem problem{{model, cluster, 16}};
  const std::vector<int> cut = *balance(Balancer::kOptimal, problem);
  const auto found = refined(cut, problem);
  ASSERT_TRUE(found) << found.error().message;
  const double best = (*simulated_optimum({model, cluster, 16}, ScheduleKind::k1F1B))->step_time_s;
  EXPECT_EQ(replay_s(*found, problem), best);
  EXPECT_GT(replay_s(refine(std::array{cut}, problem)->counts, problem), best);
}

// A step of 64 ranks and 256 micro-batches has 130,000 actions and a cut 4,032 neighbours.
TEST(Refine, EndsEarlyOnLargeProblems) {
  Rng rng(5);
  const cost::ModelCost model = random_model(rng, 256);
  const cost::Cluster cluster = cost::equal_ranks(64);
  const BalanceProblem problem{{model, cluster, 256}};
  const std::vector<std::vector<int>> starts = {even(problem)};
  const auto refined = refine(starts, problem);
  ASSERT_TRUE(refined) << refined.error().message;
  EXPECT_LT(refined->replays, 100);
  EXPECT_LE(replay_s(refined->counts, problem), replay_s(starts[0], problem));
}

TEST(Refine, MovesOfManyStagesTakeBoundedWork) {
  for (const std::size_t stages : {std::size_t{100}, std::size_t{1000}}) {
    std::int64_t looked_at = 0;
    const auto bound_of = [&](const std::vector<int>& counts) {
      looked_at += std::ssize(counts);
      return static_cast<double>(std::ranges::max(counts));
    };
    const std::vector<int> counts(stages, 2);
    const auto found = moves_below(4.0, counts, bound_of);
    const auto all = static_cast<std::int64_t>(stages * (stages - 1) * stages);
    EXPECT_EQ(looked_at, stages == 100 ? all : looked_at);
    EXPECT_LE(looked_at, 5'000'000);
    EXPECT_EQ(static_cast<std::int64_t>(found.size() * stages), looked_at) << "each is below 4";
    EXPECT_EQ(found.front().move.of(counts)[found.front().move.from], 1);
    EXPECT_EQ(found.front().move.of(counts)[found.front().move.to], 3);
  }
}

}  // namespace
}  // namespace dynmo::plan
