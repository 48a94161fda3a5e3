// SPDX-License-Identifier: Apache-2.0
// Cuts made together with the layers that are recomputed.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <optional>
#include <span>

#include "dynmo/plan/pack.h"
#include "dynmo/plan/propose.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/plan/search.h"
#include "tests/plan/cuts.h"
#include "tests/support/samples.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

constexpr std::int64_t kMegabyte = 1'000'000;

// Layers of 1 ms F, I and W each that save 10 MB and pass 1 MB on, without state. `drawn`: of
// unlike times and bytes around these.
cost::ModelCost half_blocks(int layers, std::optional<std::uint64_t> drawn = std::nullopt) {
  cost::ModelCost model;
  Rng rng(drawn.value_or(0));
  for (int i = 0; i < layers; ++i) {
    const auto around = [&](double value) {
      return drawn ? value * (0.6 + 0.8 * rng.uniform()) : value;
    };
    cost::LayerCost layer;
    layer.name = fmt::format("layer {}", i);
    layer.forward_s = around(1e-3);
    layer.backward_input_s = layer.backward_weight_s = layer.forward_s;
    layer.activation_bytes = Bytes{static_cast<std::int64_t>(around(10.0 * kMegabyte))};
    layer.boundary_bytes = Bytes{kMegabyte};
    model.layers.push_back(std::move(layer));
  }
  return model;
}

// `percent` of what the first rank of an even 1F1B cut saves.
cost::Cluster ranks_with(int ranks, const cost::ModelCost& model, int percent) {
  std::int64_t saved = 0;
  for (const cost::LayerCost& layer : model.layers) saved += layer.activation_bytes.value;
  return cost::equal_ranks(ranks, Bytes{saved * percent / 100});
}

Expected<Proposal> plan_for(const cost::ModelCost& model, const cost::Cluster& cluster,
                            Recompute choice, ScheduleKind kind = ScheduleKind::k1F1B,
                            Balancer balancer = Balancer::kOptimal) {
  BalanceProblem problem{{model, cluster, 4 * cluster.size()}, kind};
  problem.recompute = choice;
  return propose(balancer, problem, {.evaluations = 30});
}

// The oracle tries all sets of a range under 1F1B with `held` stashes.
double least_seconds(const cost::ModelCost& model, int first, int end, int held, Bytes memory) {
  double least = std::numeric_limits<double>::infinity();
  for (unsigned set = 0; set < (1U << (end - first)); ++set) {
    std::int64_t state = 0;
    double seconds = 0;
    std::vector<std::int64_t> now;      // by layer: a stash
    std::vector<std::int64_t> running;  // and while its gradient runs
    for (int i = first; i < end; ++i) {
      const cost::LayerCost& layer = model.layers[static_cast<std::size_t>(i)];
      const std::int64_t input =
          i == 0 ? 0 : model.layers[static_cast<std::size_t>(i) - 1].boundary_bytes.value;
      state += cost::state_bytes(layer).value;
      const bool again = (set >> (i - first) & 1U) != 0;
      now.push_back(again ? input : layer.activation_bytes.value);
      running.push_back(std::max(now.back(), layer.activation_bytes.value));
      if (again) seconds += layer.forward_s;
    }
    // The layers of the oldest micro-batch run backward, and are freed from the last one on.
    const std::int64_t all = std::accumulate(now.begin(), now.end(), std::int64_t{0});
    std::int64_t oldest = all;
    std::int64_t most = held * all;
    while (!now.empty()) {
      most = std::max(most, (held - 1) * all + oldest - now.back() + running.back());
      oldest -= now.back();
      now.pop_back();
      running.pop_back();
    }
    if (state + most <= memory.value) least = std::min(least, seconds);
  }
  return least;
}

TEST(RecomputeCut, CutAndSetTogetherAreTheBestOfAll) {
  int recomputes = 0;
  int impossible = 0;
  for (std::uint64_t seed = 0; seed < samples(500U); ++seed) {
    Rng rng(seed);
    const int layers = pick(rng, 5, 9);
    const int ranks = pick(rng, 2, 4);
    cost::ModelCost model = random_model(rng, layers);
    cost::Cluster cluster = cost::equal_ranks(ranks);
    std::int64_t saved = 0;
    for (cost::LayerCost& layer : model.layers) {
      layer.frozen = false;
      layer.activation_bytes = Bytes{pick(rng, 20, 90)};
      layer.boundary_bytes = Bytes{pick(rng, 1, 9)};
      saved += layer.activation_bytes.value;
    }
    for (cost::ClusterRank& rank : cluster.ranks) {
      rank.memory = Bytes{saved * pick(rng, 20, 95) / 100};
      rank.speed = rng.uniform() < 0.3 ? 0.75 : 1;
    }
    BalanceProblem problem{{model, cluster, 2 * ranks}};
    problem.recompute = Recompute::kAuto;
    const std::vector<double> work = cost::layer_work_s(model, problem.micro_batches);
    const auto slowest = [&](const std::vector<int>& counts) {
      double longest = 0;
      int first = 0;
      for (int r = 0; r < ranks; ++r) {
        const int end = first + counts[static_cast<std::size_t>(r)];
        const cost::ClusterRank& rank = cluster.ranks[static_cast<std::size_t>(r)];
        double seconds = least_seconds(model, first, end, ranks - r, rank.memory);
        for (int i = first; i < end; ++i) seconds += work[static_cast<std::size_t>(i)];
        longest = std::max(longest, seconds / rank.speed);
        first = end;
      }
      return longest;
    };
    double best = std::numeric_limits<double>::infinity();
    for_each_cut(layers, ranks,
                 [&](const std::vector<int>& counts) { best = std::min(best, slowest(counts)); });
    const auto cut = balance(Balancer::kOptimal, problem);
    ASSERT_EQ(cut.has_value(), best < 1e9) << "seed " << seed;
    if (!cut) {
      ++impossible;
      continue;
    }
    EXPECT_LE(slowest(*cut), best * (1 + 1e-6)) << "seed " << seed;
    const auto plan = recomputed_layers(Recompute::kAuto, make_plan(*cut, ScheduleKind::k1F1B),
                                        {model, cluster, problem.micro_batches});
    ASSERT_TRUE(plan) << "seed " << seed << ": " << plan.error().message;
    if (!plan->empty()) ++recomputes;
  }
  EXPECT_GT(recomputes, samples(100));
  EXPECT_GT(impossible, samples(5));
}

TEST(RecomputeCut, EqualHalfBlocksComeAsNearToIdealAsTheyCan) {
  const cost::ModelCost model = half_blocks(64);
  const double ideal = 64 * 3e-3 / 8;
  for (const auto& [percent, most] :
       {std::pair(25, 1.25), std::pair(40, 1.17), std::pair(55, 1.13), std::pair(70, 1.13)}) {
    const auto plan = plan_for(model, ranks_with(8, model, percent), Recompute::kAuto);
    ASSERT_TRUE(plan) << plan.error().message;
    EXPECT_LE(plan->evaluation.bottleneck_s, most * ideal * (1 + 1e-9)) << percent << " %";
  }
}

TEST(RecomputeCut, MoreMemoryIsNeverSlowerNorIsChoosingSlowerThanNoneOrAll) {
  for (const auto& [layers, ranks] :
       {std::pair(64, 4), std::pair(64, 8), std::pair(96, 4), std::pair(96, 8)}) {
    for (const bool drawn : {false, true}) {
      const cost::ModelCost model = drawn ? half_blocks(layers, 3) : half_blocks(layers);
      double before = std::numeric_limits<double>::infinity();
      for (int step = 0; step < 20; ++step) {
        const int percent = 20 + 80 * step / 19;
        const cost::Cluster cluster = ranks_with(ranks, model, percent);
        const auto what = fmt::format("{} layers, {} ranks, {} %, {}", layers, ranks, percent,
                                      drawn ? "drawn" : "equal");
        const auto plan = plan_for(model, cluster, Recompute::kAuto);
        ASSERT_TRUE(plan) << what << ": " << plan.error().message;
        const double own = plan->evaluation.step_time_s;
        EXPECT_LE(own, before) << what;
        before = own;
        for (const Recompute other : {Recompute::kNone, Recompute::kWhole}) {
          const auto rival = plan_for(model, cluster, other);
          if (!rival) continue;
          EXPECT_LE(own, rival->evaluation.step_time_s) << what;
        }
      }
    }
  }
}

TEST(RecomputeCut, SearchRefusesNothingThatOneForwardOneBackwardFits) {
  const cost::ModelCost model = half_blocks(16);
  for (const int percent : {15, 25, 40, 70}) {
    const cost::Cluster cluster = ranks_with(4, model, percent);
    for (const Recompute choice : {Recompute::kNone, Recompute::kWhole, Recompute::kAuto}) {
      const auto simple = plan_for(model, cluster, choice);
      if (!simple) continue;
      const auto found = plan_for(model, cluster, choice, ScheduleKind::k1F1B, Balancer::kSearch);
      ASSERT_TRUE(found) << percent << " %: " << found.error().message;
      const auto best = propose(Balancer::kSearch,
                                {{model, cluster, 16}, ScheduleKind::k1F1B, 2, nullptr, choice},
                                {.schedules = ScheduleChoice::kBest, .evaluations = 200});
      ASSERT_TRUE(best) << percent << " %: " << best.error().message;
      EXPECT_LE(best->evaluation.step_time_s, simple->evaluation.step_time_s);
      for (std::size_t r = 0; r < 4; ++r) {
        EXPECT_LE(best->evaluation.result.ranks[r].peak_memory, cluster.ranks[r].memory);
      }
      const auto peaks = peak_memory(best->plan, model, 16, best->recomputed);
      ASSERT_TRUE(peaks) << peaks.error().message;
      EXPECT_LE(*std::max_element(peaks->begin(), peaks->end()), cluster.ranks[0].memory);
    }
  }
}

// Orders by list scheduling count what a second forward brings back.
TEST(RecomputeCut, AdaptiveOrdersLeaveRoomForRestoredStashes) {
  for (std::uint64_t seed = 0; seed < samples(40U); ++seed) {
    Rng rng(seed);
    const cost::ModelCost model = half_blocks(pick(rng, 8, 16), seed);
    const cost::Cluster cluster = ranks_with(pick(rng, 2, 4), model, pick(rng, 14, 60));
    const auto plan =
        plan_for(model, cluster, Recompute::kWhole, ScheduleKind::kAdaptive, Balancer::kSearch);
    if (!plan) continue;
    EXPECT_EQ(plan->recomputed, all_layers(model));
    const auto peaks = peak_memory(plan->plan, model, 4 * cluster.size(), plan->recomputed);
    ASSERT_TRUE(peaks) << "seed " << seed;
    EXPECT_LE(*std::max_element(peaks->begin(), peaks->end()), cluster.ranks[0].memory)
        << "seed " << seed;
  }
}

TEST(RecomputeCut, PackingRecomputesWhereFewRanksLackMemory) {
  const cost::ModelCost model = half_blocks(16);
  const cost::Cluster cluster = ranks_with(4, model, 30);
  BalanceProblem problem{{model, cluster, 16}};
  problem.recompute = Recompute::kAuto;
  const auto packed = pack(Balancer::kOptimal, problem, {.ranks = 2});
  ASSERT_TRUE(packed) << packed.error().message;
  EXPECT_FALSE(packed->proposal.recomputed.empty());
  EXPECT_EQ(packed->released.size(), 2U);
  for (const sim::RankUsage& rank : packed->proposal.evaluation.result.ranks) {
    EXPECT_LE(rank.peak_memory, cluster.ranks[0].memory);
  }
}

TEST(RecomputeCut, PlentyOfMemoryChangesNoPlan) {
  for (const ScheduleKind kind :
       {ScheduleKind::k1F1B, ScheduleKind::kZbH1, ScheduleKind::kZbV, ScheduleKind::kInterleaved}) {
    for (const Balancer balancer : {Balancer::kOptimal, Balancer::kTime, Balancer::kSearch}) {
      const cost::ModelCost model = half_blocks(24, 7);
      const cost::Cluster cluster = ranks_with(4, model, 400);
      const auto none = plan_for(model, cluster, Recompute::kNone, kind, balancer);
      const auto free = plan_for(model, cluster, Recompute::kAuto, kind, balancer);
      ASSERT_TRUE(none && free) << schedule::name(kind) << " " << name(balancer);
      EXPECT_EQ(none->plan, free->plan) << schedule::name(kind) << " " << name(balancer);
      EXPECT_TRUE(free->recomputed.empty());
    }
  }
}

TEST(RecomputeCut, WhatCannotBeCutSaysWhy) {
  const auto refusal = [](int layers, int micro_batches, ScheduleKind kind) {
    const cost::ModelCost model = half_blocks(layers);
    const cost::Cluster cluster = cost::equal_ranks(4);
    const auto plan = propose(Balancer::kSearch, {{model, cluster, micro_batches}, kind});
    EXPECT_FALSE(plan);
    EXPECT_EQ(plan.error().code, ErrorCode::kBadInput);
    EXPECT_EQ(plan.error().message.find("memory"), std::string::npos) << plan.error().message;
    return plan.error().message;
  };
  EXPECT_NE(refusal(3, 8, ScheduleKind::k1F1B).find("4 ranks for 3 layers"), std::string::npos);
  EXPECT_NE(refusal(7, 8, ScheduleKind::kInterleaved).find("4 ranks with 2 stages each for 7"),
            std::string::npos);
  EXPECT_NE(refusal(10, 7, ScheduleKind::kInterleaved).find("micro-batches"), std::string::npos);
}

TEST(RecomputeCut, NoAdviceNamesTheBalancerInUse) {
  const cost::ModelCost model = half_blocks(16);
  const cost::Cluster cluster = ranks_with(4, model, 5);
  for (const Balancer balancer : balancers()) {
    for (const Recompute choice : {Recompute::kNone, Recompute::kWhole, Recompute::kAuto}) {
      for (const ScheduleKind kind : {ScheduleKind::k1F1B, ScheduleKind::kZbV}) {
        const auto plan = plan_for(model, cluster, choice, kind, balancer);
        if (plan || plan.error().code != ErrorCode::kInfeasible) continue;
        EXPECT_EQ(plan.error().message.find(fmt::format("{} balancer", name(balancer))),
                  std::string::npos)
            << plan.error().message;
      }
    }
  }
}

}  // namespace
}  // namespace dynmo::plan
