// SPDX-License-Identifier: Apache-2.0
// More memory never gives a slower plan, whichever balancer makes it.

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <string>

#include "dynmo/plan/memory_ladder_impl.h"
#include "dynmo/plan/recompute.h"
#include "tests/plan/cuts.h"
#include "tests/plan/half_blocks.h"
#include "tests/support/samples.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

struct Way {
  ScheduleKind kind;
  Balancer balancer;
};

// At `memories` memories from 20 to 100 % of what the first rank of an even 1F1B cut saves.
void expect_no_growth(const Way& way, int layers, int ranks, bool drawn, int memories) {
  const cost::ModelCost model = drawn ? half_blocks(layers, 3) : half_blocks(layers);
  double before = std::numeric_limits<double>::infinity();
  for (int step = 0; step < memories; ++step) {
    const int percent = 20 + 80 * step / (memories - 1);
    const cost::Cluster cluster = ranks_with(ranks, model, percent);
    const auto what =
        fmt::format("{} {}, {} layers, {} ranks, {} %, {}", schedule::name(way.kind),
                    name(way.balancer), layers, ranks, percent, drawn ? "drawn" : "equal");
    const auto plan = plan_for(model, cluster, Recompute::kAuto, way.kind, way.balancer);
    if (!plan) {
      EXPECT_EQ(before, std::numeric_limits<double>::infinity()) << what;
      continue;
    }
    const double own = plan->evaluation.step_time_s;
    EXPECT_LE(own, before) << what;
    before = own;
    for (const Recompute other : {Recompute::kNone, Recompute::kWhole}) {
      const auto rival = plan_for(model, cluster, other, way.kind, way.balancer);
      if (!rival) continue;
      EXPECT_LE(own, rival->evaluation.step_time_s)
          << what << ", " << (other == Recompute::kNone ? "none" : "whole");
    }
  }
}

TEST(MemoryLadder, NoStepGrowsWithMemoryNorIsAboveNoneOrAll) {
  for (const Way& way :
       {Way{ScheduleKind::kZbV, Balancer::kVPair}, Way{ScheduleKind::kZbV, Balancer::kOptimal},
        Way{ScheduleKind::kInterleaved, Balancer::kOptimal},
        Way{ScheduleKind::kZbH1, Balancer::kOptimal},
        Way{ScheduleKind::kInterleaved, Balancer::kTime}}) {
    for (const int layers : {64, 96}) {
      for (const int ranks : {4, 8}) {
        for (const bool drawn : {false, true}) expect_no_growth(way, layers, ranks, drawn, 20);
      }
    }
  }
}

TEST(MemoryLadder, NoSearchedStepGrowsWithMemoryNorIsAboveNoneOrAll) {
  for (const ScheduleKind kind :
       {ScheduleKind::k1F1B, ScheduleKind::kZbV, ScheduleKind::kAdaptive}) {
    for (const bool drawn : {false, true}) {
      expect_no_growth({kind, Balancer::kSearch}, 64, 4, drawn, 20);
    }
  }
}

// Of one plan with several stages a rank no step is longer with more memory.
TEST(MemoryLadder, SetsOfSeveralStagesShrinkAsMemoryGrows) {
  int shrunk = 0;
  for (std::uint64_t seed = 0; seed < samples(60U); ++seed) {
    Rng rng(mix_key({0x1ADD, seed}));
    const int ranks = pick(rng, 2, 4);
    const cost::ModelCost model = half_blocks(pick(rng, 4 * ranks, 40), seed);
    const ScheduleKind kind = seed % 2 == 0 ? ScheduleKind::kZbV : ScheduleKind::kInterleaved;
    const cost::Cluster plenty = cost::equal_ranks(ranks);
    const auto plan = plan_for(model, plenty, Recompute::kNone, kind);
    ASSERT_TRUE(plan) << plan.error().message;
    Nanoseconds before = Nanoseconds::max();
    LayerSet last = all_layers(model);
    last.insert(last.begin(), LayerId(0));
    for (int percent = 10; percent <= 150; percent += 7) {
      const cost::Cluster cluster = ranks_with(ranks, model, percent);
      const auto judged = judge(Recompute::kAuto, plan->plan, model, cluster, 4 * ranks);
      ASSERT_TRUE(judged) << judged.error().message;
      ASSERT_LE(judged->evaluation.result.step_time, before) << "seed " << seed << ", " << percent;
      ASSERT_TRUE(std::ranges::includes(last, judged->recomputed)) << "seed " << seed;
      shrunk += judged->recomputed.size() < last.size() ? 1 : 0;
      before = judged->evaluation.result.step_time;
      last = judged->recomputed;
    }
  }
  EXPECT_GT(shrunk, samples(60));
}

TEST(MemoryLadder, RungsDoNotDependOnTheMemoryAboveThem) {
  using internal::rung;
  EXPECT_EQ(rung(Bytes{1000}), Bytes{960});  // 15 x 64
  EXPECT_EQ(rung(Bytes{1000}, 7), Bytes{512});
  EXPECT_EQ(rung(Bytes{1000}, 8), Bytes{480});
  EXPECT_EQ(rung(Bytes{3}, 5), Bytes{0});
  EXPECT_EQ(rung(cost::kUnlimitedMemory, 3), cost::kUnlimitedMemory);
  for (std::uint64_t seed = 0; seed < samples(300U); ++seed) {
    Rng rng(mix_key({0x1ADE, seed}));
    const Bytes memory{static_cast<std::int64_t>(rng.below(std::uint64_t{1} << pick(rng, 5, 50)))};
    const Bytes own = rung(memory);
    ASSERT_LE(own, memory);
    ASSERT_EQ(rung(own), own);
    for (int below = 1; below < 30; ++below) {
      const Bytes lower = rung(memory, below);
      ASSERT_EQ(rung(lower), lower);
      ASSERT_EQ(rung(lower, 1), rung(memory, below + 1));
      ASSERT_TRUE(lower == Bytes{0} || rung(lower, 1) < lower);
    }
  }
}

}  // namespace
}  // namespace dynmo::plan
