// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/policy.h"

#include <gtest/gtest.h>

#include <cmath>

#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/pack.h"
#include "tests/plan/cuts.h"

namespace dynmo::control {
namespace {

using schedule::ScheduleKind;

plan::Plan even_plan(int layers, int ranks) {
  return plan::make_plan(std::vector<int>(static_cast<std::size_t>(ranks), layers / ranks),
                         ScheduleKind::k1F1B, 3);
}

cost::ModelCost with_frozen_prefix(cost::ModelCost model, int layers) {
  for (int i = 0; i < layers; ++i) model.layers[static_cast<std::size_t>(i)].frozen = true;
  return model;
}

cost::ModelCost jittered(cost::ModelCost model, double deviation, Rng& rng) {
  for (cost::LayerCost& layer : model.layers) {
    const double factor = 1 + deviation * std::sqrt(3.0) * (2 * rng.uniform() - 1);
    layer.forward_s *= factor;
    layer.backward_input_s *= factor;
    layer.backward_weight_s *= factor;
  }
  return model;
}

TEST(Policy, AGrownFrozenPrefixIsAnsweredAtOnce) {
  const cost::Cluster cluster = cost::equal_ranks(4);
  const plan::Plan plan = even_plan(16, 4);
  const cost::ModelCost before = plan::equal_model(16, 1e-3);
  const cost::ModelCost after = with_frozen_prefix(before, 6);
  const auto calm = decide({plan, before, 0.02, cluster, 16, 1000});
  EXPECT_FALSE(calm->migrate);
  EXPECT_EQ(calm->plan, plan);
  const auto decision = decide({plan, after, 0.02, cluster, 16, 1000, 1e9, 0.01});
  ASSERT_TRUE(decision) << decision.error().message;
  EXPECT_TRUE(decision->migrate) << decision->reason;
  EXPECT_EQ(decision->plan.generation, plan.generation + 1);
  EXPECT_EQ(decision->plan.schedule, plan.schedule);
  EXPECT_LT(decision->planned_step_s, decision->current_step_s);
  EXPECT_LT(decision->imbalance_after, decision->imbalance_before);
  EXPECT_EQ(decision->reason.find('\n'), std::string::npos);
  // The prediction is what the replay says.
  EXPECT_EQ(decision->planned_step_s, evaluate(decision->plan, {after, cluster, 16})->step_time_s);
  const auto next = decide({decision->plan, after, 0.02, cluster, 16, 1000});
  EXPECT_FALSE(next->migrate) << next->reason;
}

// An even cut of four layers saves 3 of 21 ms of compute. Where the gradients of layer 1 take 300
// ms to sum over the replicas, at the end of rank 0's work or 2 ms earlier of rank 1's, the step is
// only 1 ms shorter: less than the least gain worth a move.
TEST(Policy, WeighsAGainAgainstAStepThatReducesGradients) {
  cost::ModelCost model = plan::equal_model(4, 1e-3);
  for (cost::LayerCost& layer : model.layers) layer.gradient_bytes = Bytes{0};
  model.layers[1].gradient_bytes = Bytes{3000};
  const plan::Plan plan = plan::make_plan({1, 3}, ScheduleKind::k1F1B);
  cost::Cluster cluster = cost::equal_ranks(2);
  EXPECT_TRUE(decide({plan, model, 0.0, cluster, 2, 1000})->migrate);
  cluster.replicas = 2;
  cluster.between_replicas.bandwidth_bytes_per_s = 3000 / 0.3;
  const auto decision = decide({plan, model, 0.0, cluster, 2, 1000});
  ASSERT_TRUE(decision) << decision.error().message;
  EXPECT_FALSE(decision->migrate) << decision->reason;
  EXPECT_EQ(decision->current_step_s, evaluate(plan, {model, cluster, 2})->step_time_s);
  EXPECT_NEAR(decision->current_step_s, 0.319, 1e-9);
  EXPECT_NEAR(decision->planned_step_s, 0.318, 1e-9);
}

TEST(Policy, FollowsAFreezingRunToItsEnd) {
  const cost::Cluster cluster = cost::equal_ranks(4);
  plan::Plan plan = even_plan(24, 4);
  int moves = 0;
  Rng rng(5);
  cost::ModelCost model = plan::equal_model(24, 1e-3);
  for (int frozen = 0; frozen <= 20; ++frozen) {
    model = with_frozen_prefix(plan::equal_model(24, 1e-3), frozen);
    const auto decision =
        decide({plan, jittered(model, 0.005, rng), 0.005, cluster, 16, 500, 1e9, 0.001});
    plan = decision->plan;
    moves += decision->migrate ? 1 : 0;
  }
  EXPECT_GE(moves, 3);
  const double reached = evaluate(plan, {model, cluster, 16})->step_time_s;
  const auto best = balance(plan::Balancer::kOptimal, {{model, cluster, 16}});
  const double least =
      evaluate(plan::make_plan(*best, ScheduleKind::k1F1B), {model, cluster, 16})->step_time_s;
  EXPECT_LT(reached, 1.05 * least);
  EXPECT_LT(reached, 0.8 * evaluate(even_plan(24, 4), {model, cluster, 16})->step_time_s);
}

TEST(Policy, NoiseOnConstantCostsMovesAtMostOnce) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    Rng rng(mix_key({0x9015E, seed}));
    const cost::ModelCost model =
        seed % 2 == 0 ? plan::equal_model(16, 1e-3) : plan::random_model(rng, 16);
    const cost::Cluster cluster = cost::equal_ranks(4);
    plan::Plan plan = even_plan(16, 4);
    int moves = 0;
    for (int step = 0; step < 1000; ++step) {
      const double deviation = 0.03 / std::sqrt(3.0);  // of +-3 %, evenly spread
      const auto decision =
          decide({plan, jittered(model, deviation, rng), deviation, cluster, 8, 1e9});
      ASSERT_TRUE(decision);
      moves += decision->migrate ? 1 : 0;
      plan = decision->plan;
    }
    EXPECT_LE(moves, 1) << "seed " << seed;
  }
}

// A processor that others use makes all layers on it slower for a while, wherever they are.
TEST(Policy, NoiseThatTheLayersOfARankShareMovesAtMostOnce) {
  constexpr double kDeviation = 0.05;
  int moves_unaware = 0;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    Rng rng(mix_key({0x5A4E, seed}));
    const cost::ModelCost model =
        seed % 2 == 0 ? plan::equal_model(18, 1e-3) : plan::random_model(rng, 18);
    const cost::Cluster cluster = cost::equal_ranks(3);
    const auto moves = [&](double rank_noise) {
      plan::Plan plan = plan::make_plan(*balance(plan::Balancer::kOptimal, {{model, cluster, 8}}),
                                        ScheduleKind::k1F1B);
      int count = 0;
      for (int step = 0; step < 1000; ++step) {
        cost::ModelCost seen = model;
        const std::vector<Rank> owner = owners(plan);
        for (int rank = 0; rank < 3; ++rank) {
          const double slower = 1 + kDeviation * rng.normal();
          for (std::size_t i = 0; i < owner.size(); ++i) {
            if (owner[i] != Rank(rank)) continue;
            seen.layers[i].forward_s *= slower;
            seen.layers[i].backward_input_s *= slower;
            seen.layers[i].backward_weight_s *= slower;
          }
        }
        const auto decision = decide({.current = plan,
                                      .model = seen,
                                      .cluster = cluster,
                                      .micro_batches = 8,
                                      .horizon_steps = 1e9,
                                      .rank_noise = rank_noise});
        EXPECT_TRUE(decision) << "seed " << seed;
        count += decision->migrate ? 1 : 0;
        plan = decision->plan;
      }
      return count;
    };
    EXPECT_LE(moves(kDeviation), 1) << "seed " << seed;
    moves_unaware += moves(0);
  }
  EXPECT_GT(moves_unaware, 100);
}

// 4|2 to 3|3 of equal layers of work w: of the bottleneck's 4 w, all on rank 0, stay 3 w, of which
// one was measured on rank 0; or, as both ranks then have 3 w, the lower one's: all on rank 0.
TEST(Policy, NoiseIsThatOfTheDifferenceOfTheBottlenecks) {
  const cost::ModelCost model = plan::equal_model(6, 1e-3);
  const cost::Cluster cluster = cost::equal_ranks(2);
  const plan::Plan plan = plan::make_plan({4, 2}, ScheduleKind::k1F1B);
  const double work = cost::layer_work_s(model, 8)[0];
  PolicyInput input{plan, model, 0.1, cluster, 8, 1000};
  EXPECT_NEAR(decide(input)->noise_s, 8 * 0.1 * work * std::sqrt(4.0 + 3.0), 1e-12);
  input.relative_noise = 0;
  input.rank_noise = 0.1;
  EXPECT_NEAR(decide(input)->noise_s, 8 * 0.1 * work * (4 - 3), 1e-12);
  input.rank_noise = std::nan("");
  EXPECT_EQ(decide(input).error().message, "policy: rank_noise is nan, wanted a number, 0 or more");
}

// Noise this large hides the gain, unless the cause of the change is known.
TEST(Policy, AKnownChangeNeedsLessEvidence) {
  const cost::Cluster cluster = cost::equal_ranks(4);
  const cost::ModelCost after = with_frozen_prefix(plan::equal_model(16, 1e-3), 6);
  const plan::Plan plan = even_plan(16, 4);
  PolicyInput input{plan, after, 0, cluster, 16, 1000};
  const auto calm = decide(input);
  ASSERT_TRUE(calm->migrate) << calm->reason;
  // The noise of the difference is proportional to relative_noise: a gain of 2.9 stds.
  input.relative_noise = 0.1;
  const double noise = decide(input)->noise_s;
  input.relative_noise *= (calm->current_step_s - calm->planned_step_s) / (2.9 * noise);
  EXPECT_FALSE(decide(input)->migrate);
  EXPECT_TRUE(decide(input)->within_noise);
  input.cause = Cause::kFound;  // needs three, too
  EXPECT_FALSE(decide(input)->migrate);
  input.relative_noise *= 0.9;
  EXPECT_TRUE(decide(input)->migrate) << decide(input)->reason;
  input.relative_noise *= 2;
  EXPECT_FALSE(decide(input)->migrate);
  input.cause = Cause::kKnown;
  EXPECT_TRUE(decide(input)->migrate) << decide(input)->reason;
}

TEST(Policy, DoesNotMoveForLessThanTheMoveCosts) {
  const cost::Cluster cluster = cost::equal_ranks(4);
  const plan::Plan plan = even_plan(16, 4);
  const cost::ModelCost model = with_frozen_prefix(plan::equal_model(16, 1e-3), 6);
  const auto long_horizon = decide({plan, model, 0, cluster, 16, 1000, 1e9, 0.5});
  ASSERT_TRUE(long_horizon->migrate);
  const double gain = long_horizon->current_step_s - long_horizon->planned_step_s;
  const double even = long_horizon->cost_s / gain;  // steps after which the move has paid
  EXPECT_FALSE(decide({plan, model, 0, cluster, 16, 0.99 * even, 1e9, 0.5})->migrate);
  EXPECT_TRUE(decide({plan, model, 0, cluster, 16, 1.01 * even, 1e9, 0.5})->migrate);
  EXPECT_FALSE(decide({plan, model, 0, cluster, 16, 0})->migrate);
  EXPECT_NEAR(long_horizon->cost_s,
              0.5 + static_cast<double>(long_horizon->migration.bytes().value) / 1e9, 1e-12);
}

TEST(Policy, DoesNotMoveForAGainWithinTheNoiseOrBelowTheMinimum) {
  const cost::Cluster cluster = cost::equal_ranks(4);
  const plan::Plan plan = even_plan(16, 4);
  const cost::ModelCost model = with_frozen_prefix(plan::equal_model(16, 1e-3), 6);
  const auto noisy = decide({plan, model, 0.5, cluster, 16, 1e6});
  EXPECT_FALSE(noisy->migrate);
  EXPECT_NE(noisy->reason.find("noise"), std::string::npos) << noisy->reason;
  const auto small = decide({plan, model, 0, cluster, 16, 1e6}, {.minimum_gain = 0.9});
  EXPECT_FALSE(small->migrate);
  EXPECT_NE(small->reason.find("wanted more than 90.0 %"), std::string::npos) << small->reason;
}

TEST(Policy, KeepsThePlanWhereNoCutFits) {
  const plan::Plan plan = even_plan(16, 4);
  const cost::Cluster cluster = cost::equal_ranks(4, Bytes{100});
  const auto decision = decide({plan, plan::equal_model(16, 1e-3), 0, cluster, 16, 1000});
  ASSERT_TRUE(decision);
  EXPECT_FALSE(decision->migrate);
  EXPECT_EQ(decision->plan, plan);
  EXPECT_NE(decision->reason.find("bytes"), std::string::npos) << decision->reason;
}

// Two of four ranks have two stages each, and four ranks would need eight stages of six layers.
TEST(Policy, LeavesAScheduleThatAllRanksCannotHave) {
  const plan::Plan plan = plan::make_plan({2, 1, 2, 1}, {Rank(0), Rank(1), Rank(0), Rank(1)}, 4,
                                          ScheduleKind::kInterleaved);
  const cost::Cluster cluster = cost::equal_ranks(4);
  const auto decision = decide({plan, plan::equal_model(6, 1e-3), 0.02, cluster, 8, 1000, 1e9});
  ASSERT_TRUE(decision) << decision.error().message;
  EXPECT_TRUE(decision->migrate) << decision->reason;
  EXPECT_EQ(decision->plan.schedule, ScheduleKind::k1F1B);
  EXPECT_EQ(decision->ranks_after, 4);
  // Seven ranks for six layers: no cut of any schedule.
  const auto none = decide({plan::with_more_ranks(plan, 7), plan::equal_model(6, 1e-3), 0.02,
                            cost::equal_ranks(7), 8, 1000, 1e9});
  ASSERT_TRUE(none) << none.error().message;
  EXPECT_FALSE(none->migrate);
  EXPECT_NE(none->reason.find("keep "), std::string::npos) << none->reason;
}

TEST(Policy, LeavesAPlanThatNoLongerFitsWhateverItGains) {
  cost::Cluster cluster = cost::equal_ranks(2);
  cluster.ranks[0].memory = Bytes{3 * 4000 + 3 * 2 * 100};  // three layers of the four
  const cost::ModelCost model = plan::equal_model(8, 1e-3);
  const auto decision = decide({even_plan(8, 2), model, 0.1, cluster, 8, 0});
  ASSERT_TRUE(decision->migrate) << decision->reason;
  EXPECT_EQ(to_string(decision->plan), "3|5");
}

TEST(Policy, NeverMovesToAPlanThatDoesNotFit) {
  // The time balancer, blind to memory, would put eight frozen layers on rank 0.
  const cost::Cluster cluster = cost::equal_ranks(4, Bytes{4 * 1000 + 600});
  const cost::ModelCost model = with_frozen_prefix(plan::equal_model(16, 1e-3), 8);
  const auto tight =
      decide({even_plan(16, 4), model, 0, cluster, 16, 1e6}, {.balancer = plan::Balancer::kTime});
  EXPECT_FALSE(tight->migrate) << tight->reason;
  EXPECT_NE(tight->reason.find("on rank 2, which has 4600 bytes"), std::string::npos)
      << tight->reason;
}

TEST(Policy, DecidesTheSameEveryTime) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Rng rng(mix_key({0xDEC1DE, seed}));
    const cost::ModelCost model = plan::random_model(rng, 12);
    const cost::Cluster cluster = cost::equal_ranks(3);
    const plan::Plan plan = even_plan(12, 3);
    const PolicyInput input{plan, model, 0.01, cluster, 6, 100, 1e6, 0.001};
    const auto once = decide(input);
    const auto again = decide(input);
    ASSERT_EQ(digest(once->plan), digest(again->plan)) << "seed " << seed;
    ASSERT_EQ(once->reason, again->reason) << "seed " << seed;
    ASSERT_EQ(once->migrate, once->plan != plan) << "seed " << seed;
  }
}

TEST(Policy, NumbersThatMakeNoSenseAreRefused) {
  const plan::Plan plan = even_plan(8, 2);
  const cost::ModelCost model = plan::equal_model(8, 1e-3);
  const cost::Cluster cluster = cost::equal_ranks(2);
  const auto bad = decide({plan, model, std::nan(""), cluster, 8, 100});
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.error().message, "policy: relative_noise is nan, wanted a number, 0 or more");
  EXPECT_FALSE(decide({plan, model, 0, cluster, 8, -1}));
  EXPECT_FALSE(decide({plan, model, 0, cluster, 8, 1}, {.noise_factor = -1}));
  EXPECT_FALSE(decide({plan, plan::equal_model(9, 1), 0, cluster, 8, 1}));
}

TEST(Policy, ReleasesRanksThatTheStepDoesNotNeedAndTakesThemBack) {
  const cost::Cluster cluster = cost::equal_ranks(4);
  const cost::ModelCost even = plan::equal_model(16, 1e-3);
  cost::ModelCost headed = even;  // one layer as heavy as all others
  headed.layers.back().forward_s = 0.048;
  const plan::Plan plan = even_plan(16, 4);
  const PolicyOptions options{.rank_use = RankUse::kFewest};
  const auto packed = decide({plan, headed, 0.001, cluster, 16, 1000, 1e9}, options);
  ASSERT_TRUE(packed) << packed.error().message;
  EXPECT_TRUE(packed->migrate) << packed->reason;
  EXPECT_EQ(packed->ranks_before, 4);
  EXPECT_LT(packed->ranks_after, 4) << packed->reason;
  EXPECT_LE(packed->planned_step_s, packed->current_step_s);
  const auto grown = decide({packed->plan, even, 0.001, cluster, 16, 1000, 1e9}, options);
  EXPECT_TRUE(grown->migrate) << grown->reason;
  EXPECT_EQ(grown->ranks_after, 4);
  // A move that costs more than the ranks' time is worth is not made.
  const auto dear = decide({plan, headed, 0.001, cluster, 16, 1, 1e9, 100}, options);
  EXPECT_FALSE(dear->migrate) << dear->reason;
}

// A second release gets no slack of its own.
TEST(Policy, SlackIsMeasuredAgainstAllRanksThatThereWere) {
  const cost::ModelCost model = plan::equal_model(16, 1e-3);
  const PolicyOptions options{.rank_use = RankUse::kFewest, .pack_slack = 1};
  const cost::Cluster eight = cost::equal_ranks(8);
  const plan::Plan plan = even_plan(16, 8);
  const auto packed = decide({plan, model, 0, eight, 32, 1000, 1e9}, options);
  ASSERT_TRUE(packed && packed->migrate) << packed->reason;
  EXPECT_LE(packed->planned_step_s, 2 * packed->current_step_s);
  ASSERT_EQ(packed->ranks_after, 4);
  const cost::Cluster rest = cost::equal_ranks(packed->ranks_after);
  const plan::Plan left = plan::without_others(packed->plan, plan::ranks_at_work(packed->plan));
  PolicyInput input{left, model, 0, rest, 32, 1000, 1e9};
  EXPECT_EQ(decide(input, options)->ranks_after, 2) << "against the four that are left";
  input.all_ranks = 8;
  const auto again = decide(input, options);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_FALSE(again->migrate) << again->reason;
  EXPECT_EQ(again->ranks_after, packed->ranks_after);
}

// The set in force is none of the plan's: what is recomputed follows from each plan.
TEST(Policy, PlansAreWeighedEachWithTheLayersThatItRecomputes) {
  cost::ModelCost model = plan::equal_model(16, 1e-3);
  for (cost::LayerCost& layer : model.layers) layer.boundary_bytes = Bytes{10};
  for (int i = 0; i < 4; ++i) model.layers[static_cast<std::size_t>(i)].frozen = true;
  const int micro_batches = 16;
  const cost::Cluster cluster = cost::equal_ranks(4, Bytes{4 * 4000 + 4 * 4 * 60});
  const plan::Plan plan = even_plan(16, 4);
  const auto set =
      plan::recomputed_layers(plan::Recompute::kAuto, plan, {model, cluster, micro_batches});
  ASSERT_TRUE(set) << set.error().message;
  ASSERT_FALSE(set->empty());
  PolicyInput input{plan, model, 0, cluster, micro_batches, 1000, 1e9};
  input.cause = Cause::kKnown;
  input.recomputed = *set;
  const auto decision = decide(input, {.recompute = plan::Recompute::kAuto});
  ASSERT_TRUE(decision) << decision.error().message;
  const auto current = plan::evaluate_recomputed(plan, {model, cluster, micro_batches}, *set);
  EXPECT_EQ(decision->current_step_s, current->step_time_s);
  ASSERT_TRUE(decision->migrate) << decision->reason;
  const auto planned = plan::evaluate_recomputed(decision->plan, {model, cluster, micro_batches},
                                                 decision->recomputed);
  EXPECT_EQ(decision->planned_step_s, planned->step_time_s);
  EXPECT_TRUE(plan::fits_memory(planned->result, cluster));
  EXPECT_EQ(decision->recomputed, plan::recomputed_layers(plan::Recompute::kAuto, decision->plan,
                                                          {model, cluster, micro_batches})
                                      .value());
}

// Stashes have grown since the set in force was chosen.
TEST(Policy, TheCutInForceRecomputesWhatItsMemoryNeedsNow) {
  cost::ModelCost model = plan::equal_model(16, 1e-3);
  for (cost::LayerCost& layer : model.layers) layer.boundary_bytes = Bytes{10};
  const cost::Cluster cluster = cost::equal_ranks(4, Bytes{4 * 4000 + 4 * 4 * 60});
  plan::BalanceProblem problem{{model, cluster, 16}};
  problem.recompute = plan::Recompute::kAuto;
  const plan::Plan plan = plan::propose(plan::Balancer::kOptimal, problem)->plan;
  const PolicyInput input{plan, model, 0, cluster, 16, 1000, 1e9};
  const auto decision = decide(input, {.recompute = plan::Recompute::kAuto});
  ASSERT_TRUE(decision) << decision.error().message;
  EXPECT_FALSE(decision->migrate) << decision->reason;
  EXPECT_EQ(decision->plan, plan);
  EXPECT_FALSE(decision->recomputed.empty());
  const auto again =
      plan::evaluate_recomputed(plan, {model, cluster, 16}, decision->recomputed).value();
  EXPECT_TRUE(plan::fits_memory(again.result, cluster));
  EXPECT_EQ(decision->current_step_s, again.step_time_s);
}

}  // namespace
}  // namespace dynmo::control
