// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/recompute.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>

#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/propose.h"
#include "tests/plan/cuts.h"
#include "tests/support/samples.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

constexpr std::array kFixedKinds = {ScheduleKind::kGpipe, ScheduleKind::k1F1B, ScheduleKind::kZbH1,
                                    ScheduleKind::kInterleaved, ScheduleKind::kZbV};

// Layers that differ in everything, the first `frozen` of them frozen.
cost::ModelCost model_with_frozen(Rng& rng, int layers, int frozen) {
  cost::ModelCost model;
  for (int i = 0; i < layers; ++i) {
    cost::LayerCost layer;
    layer.name = fmt::format("layer {}", i);
    layer.forward_s = pick(rng, 1, 9) * 1e-3;
    layer.backward_input_s = pick(rng, 1, 9) * 1e-3;
    layer.backward_weight_s = pick(rng, 1, 9) * 1e-3;
    layer.parameter_bytes = layer.gradient_bytes = Bytes{pick(rng, 1, 8)};
    layer.optimizer_bytes = layer.parameter_bytes * 2;
    layer.boundary_bytes = Bytes{8};
    layer.activation_bytes = Bytes{pick(rng, 4, 60)};  // some are less than the input
    layer.frozen = i < frozen;
    model.layers.push_back(std::move(layer));
  }
  return model;
}

Plan random_plan(Rng& rng, ScheduleKind kind, int layers, int ranks) {
  const bool two = kind == ScheduleKind::kInterleaved || kind == ScheduleKind::kZbV;
  std::vector<int> counts(static_cast<std::size_t>(two ? 2 * ranks : ranks), 1);
  for (int left = layers - static_cast<int>(counts.size()); left > 0; --left) {
    ++counts[rng.below(counts.size())];
  }
  if (!two) return make_plan(counts, kind);
  std::vector<Rank> placement;
  for (int s = 0; s < 2 * ranks; ++s) {
    const bool back = s >= ranks && kind == ScheduleKind::kZbV;
    placement.emplace_back(back ? 2 * ranks - 1 - s : s % ranks);
  }
  return make_plan(counts, placement, ranks, kind);
}

LayerSet set_of(unsigned bits, int layers) {
  LayerSet set;
  for (int i = 0; i < layers; ++i) {
    if ((bits >> i) & 1U) set.emplace_back(i);
  }
  return set;
}

Bytes part(Bytes bytes, int percent) { return Bytes{bytes.value * percent / 100}; }

bool fits(const std::vector<Bytes>& peaks, const cost::Cluster& cluster) {
  for (std::size_t r = 0; r < peaks.size(); ++r) {
    if (peaks[r] > cluster.ranks[r].memory) return false;
  }
  return true;
}

double added(const cost::ModelCost& model, const Plan& plan, const LayerSet& set, Rank rank) {
  double sum = 0;
  for (const LayerId id : set) {
    if (plan.owner(id) == rank) sum += model.layers[id.index()].forward_s;
  }
  return sum;
}

TEST(Recompute, WithoutAnyLayerThePeakIsTheReplays) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng(seed);
    const int layers = pick(rng, 8, 12);
    const cost::ModelCost model = model_with_frozen(rng, layers, pick(rng, 0, 3));
    const int ranks = pick(rng, 1, 3);
    for (const ScheduleKind kind : kFixedKinds) {
      const Plan plan = random_plan(rng, kind, layers, ranks);
      const auto evaluation = evaluate(plan, {model, cost::equal_ranks(ranks), 2 * ranks});
      const auto peaks = peak_memory(plan, model, 2 * ranks, {});
      ASSERT_TRUE(evaluation && peaks) << "seed " << seed;
      for (std::size_t r = 0; r < peaks->size(); ++r) {
        EXPECT_EQ((*peaks)[r], evaluation->result.ranks[r].peak_memory)
            << "seed " << seed << " " << schedule::name(kind) << " rank " << r;
      }
    }
  }
}

TEST(Recompute, ThePeakCountsWhatASecondForwardBringsBack) {
  // One rank, one micro-batch, two layers of 100 and 60 on an input of 8: state 4 x 10 each.
  cost::ModelCost model;
  for (const int activation : {0, 100, 60}) {
    cost::LayerCost layer;
    layer.forward_s = layer.backward_input_s = layer.backward_weight_s = 1e-3;
    layer.boundary_bytes = Bytes{8};
    layer.activation_bytes = Bytes{activation};
    model.layers.push_back(layer);
  }
  const auto peak = [&](ScheduleKind kind, int micro_batches, const LayerSet& set) {
    return peak_memory(make_plan({3}, kind), model, micro_batches, set).value()[0].value;
  };
  const LayerSet both = {LayerId(1), LayerId(2)};
  EXPECT_EQ(peak(ScheduleKind::k1F1B, 1, {}), 160);
  // In the backward pass one layer at a time is restored. That of 100 is so once the other is free.
  EXPECT_EQ(peak(ScheduleKind::k1F1B, 1, both), 100);
  EXPECT_EQ(peak(ScheduleKind::k1F1B, 1, {LayerId(1)}), 100);
  EXPECT_EQ(peak(ScheduleKind::k1F1B, 1, {LayerId(2)}), 100 + 60);
  // GPipe: four micro-batches are held, one is in its backward pass.
  EXPECT_EQ(peak(ScheduleKind::kGpipe, 4, both), 3 * (8 + 8) + 100);
  EXPECT_EQ(peak(ScheduleKind::kGpipe, 4, {LayerId(2)}), 4 * (100 + 8) + 52);
}

TEST(Recompute, CostsGainTheForwardTimeAndLoseAllButTheInput) {
  Rng rng(3);
  const cost::ModelCost model = model_with_frozen(rng, 6, 2);
  const cost::ModelCost now = recomputed(model, {LayerId(1), LayerId(4)});
  EXPECT_EQ(now.layers[1], model.layers[1]) << "a frozen prefix keeps nothing anyway";
  EXPECT_EQ(now.layers[3], model.layers[3]);
  EXPECT_EQ(now.layers[4].activation_bytes, model.layers[3].boundary_bytes);
  EXPECT_DOUBLE_EQ(now.layers[4].backward_input_s,
                   model.layers[4].backward_input_s + model.layers[4].forward_s);
  EXPECT_EQ(now.layers[4].forward_s, model.layers[4].forward_s);
}

// Against all sets: the one chosen fits, adds the least work to every rank, and with one stage a
// rank no set that fits has a shorter step.
TEST(Recompute, AutoIsTheBestOfAllSetsThatFit) {
  int constrained = 0;
  int impossible = 0;
  for (std::uint64_t seed = 0; seed < samples(300U); ++seed) {
    Rng rng(seed);
    const int ranks = pick(rng, 1, 3);
    const int layers = pick(rng, 2 * ranks + 1, 9);
    const int micro_batches = 2 * ranks;
    const cost::ModelCost model = model_with_frozen(rng, layers, pick(rng, 0, 2));
    const ScheduleKind kind = kFixedKinds[rng.below(kFixedKinds.size())];
    const Plan plan = random_plan(rng, kind, layers, ranks);
    cost::Cluster cluster = cost::equal_ranks(ranks);
    const auto most = peak_memory(plan, model, micro_batches, {}).value();
    for (std::size_t r = 0; r < most.size(); ++r) {
      cluster.ranks[r].memory = part(most[r], pick(rng, 40, 105));
    }
    double shortest = std::numeric_limits<double>::infinity();
    std::vector<double> least(most.size(), shortest);
    for (unsigned bits = 0; bits < (1U << layers); ++bits) {
      const LayerSet set = set_of(bits, layers);
      const auto peaks = peak_memory(plan, model, micro_batches, set).value();
      if (!fits(peaks, cluster)) continue;
      const auto evaluation =
          evaluate(plan, {recomputed(model, set), cost::equal_ranks(ranks), micro_batches});
      shortest = std::min(shortest, evaluation->step_time_s);
      for (std::size_t r = 0; r < least.size(); ++r) {
        const Rank rank(static_cast<std::int32_t>(r));
        least[r] = std::min(least[r], added(model, plan, set, rank));
      }
    }
    const auto chosen = recomputed_layers(Recompute::kAuto, plan, {model, cluster, micro_batches});
    ASSERT_EQ(chosen.has_value(), shortest < 1e9)
        << "seed " << seed << (chosen ? "" : chosen.error().message);
    if (!chosen) {
      EXPECT_EQ(chosen.error().code, ErrorCode::kInfeasible);
      ++impossible;
      continue;
    }
    if (!chosen->empty()) ++constrained;
    EXPECT_TRUE(fits(peak_memory(plan, model, micro_batches, *chosen).value(), cluster))
        << "seed " << seed;
    for (std::size_t r = 0; r < least.size(); ++r) {
      EXPECT_NEAR(added(model, plan, *chosen, Rank(static_cast<std::int32_t>(r))), least[r], 1e-12)
          << "seed " << seed << " " << schedule::name(kind) << " rank " << r;
    }
    if (kind == ScheduleKind::kInterleaved || kind == ScheduleKind::kZbV) continue;
    const auto evaluation =
        evaluate(plan, {recomputed(model, *chosen), cost::equal_ranks(ranks), micro_batches});
    EXPECT_NEAR(evaluation->step_time_s, shortest, 1e-9) << "seed " << seed;
  }
  EXPECT_GT(constrained, samples(30));
  EXPECT_GT(impossible, samples(5));
}

TEST(Recompute, ManyLayersTakeAFixedNumberOfStepsAndStillFit) {
  Rng rng(5);
  const cost::ModelCost model = model_with_frozen(rng, 96, 0);
  const Plan plan = make_plan({48, 48}, ScheduleKind::k1F1B);
  cost::Cluster cluster = cost::equal_ranks(2);
  const auto most = peak_memory(plan, model, 8, {}).value();
  for (std::size_t r = 0; r < 2; ++r) cluster.ranks[r].memory = part(most[r], 75);
  const auto chosen = recomputed_layers(Recompute::kAuto, plan, {model, cluster, 8});
  ASSERT_TRUE(chosen) << chosen.error().message;
  EXPECT_TRUE(fits(peak_memory(plan, model, 8, *chosen).value(), cluster));
  EXPECT_EQ(*chosen, recomputed_layers(Recompute::kAuto, plan, {model, cluster, 8}).value());
}

TEST(Recompute, NotEnoughMemoryNamesRankAndBytes) {
  Rng rng(5);
  const cost::ModelCost model = model_with_frozen(rng, 4, 0);
  cost::Cluster cluster = cost::equal_ranks(2);
  cluster.ranks[1].memory = Bytes{10};
  const auto chosen = recomputed_layers(Recompute::kAuto, make_plan({2, 2}, ScheduleKind::k1F1B),
                                        {model, cluster, 4});
  ASSERT_FALSE(chosen);
  EXPECT_EQ(chosen.error().code, ErrorCode::kInfeasible);
  EXPECT_NE(chosen.error().message.find("on rank 1"), std::string::npos) << chosen.error().message;
  EXPECT_NE(chosen.error().message.find("which has 10 bytes"), std::string::npos)
      << chosen.error().message;
}

TEST(Recompute, AProposalRecomputesOnlyWhereNothingElseFits) {
  Rng rng(7);
  const cost::ModelCost model = model_with_frozen(rng, 12, 0);
  const auto proposed = [&](Bytes memory, Recompute choice) {
    const cost::Cluster cluster = cost::equal_ranks(3, memory);
    return propose(Balancer::kOptimal,
                   {{model, cluster, 6}, ScheduleKind::k1F1B, 2, nullptr, choice});
  };
  const auto plenty = proposed(Bytes{1 << 20}, Recompute::kAuto);
  ASSERT_TRUE(plenty) << plenty.error().message;
  EXPECT_TRUE(plenty->recomputed.empty());
  Bytes memory{1 << 10};
  while (proposed(memory, Recompute::kNone)) memory = part(memory, 90);
  EXPECT_EQ(proposed(memory, Recompute::kNone).error().code, ErrorCode::kInfeasible);
  const auto tight = proposed(memory, Recompute::kAuto);
  ASSERT_TRUE(tight) << tight.error().message;
  EXPECT_FALSE(tight->recomputed.empty());
  const auto all = proposed(Bytes{1 << 20}, Recompute::kWhole);
  EXPECT_EQ(all->recomputed.size(), 11U);
  EXPECT_LT(tight->recomputed.size(), 11U);
  EXPECT_GT(all->evaluation.step_time_s, plenty->evaluation.step_time_s);
}

}  // namespace
}  // namespace dynmo::plan
