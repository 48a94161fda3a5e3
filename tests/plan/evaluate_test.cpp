// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/evaluate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>

#include "dynmo/plan/balance.h"
#include "dynmo/plan/simulated_optimum.h"
#include "dynmo/schedule/generate.h"
#include "tests/plan/cuts.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

TEST(Evaluate, EqualStagesTakeTheClosedForm) {
  const cost::ModelCost model = equal_model(8, 1e-3);
  for (const ScheduleKind kind : {ScheduleKind::k1F1B, ScheduleKind::kGpipe}) {
    const auto evaluation =
        evaluate(make_plan({2, 2, 2, 2}, kind), {model, cost::equal_ranks(4), 16});
    ASSERT_TRUE(evaluation) << evaluation.error().message;
    EXPECT_NEAR(evaluation->step_time_s, (16 + 4 - 1) * 6e-3, 1e-9);  // (M + P - 1)(F + B)
    EXPECT_NEAR(evaluation->result.bubble, 3.0 / 19, 1e-9);
    EXPECT_NEAR(evaluation->ideal_step_time_s, 16 * 6e-3, 1e-12);
    EXPECT_NEAR(evaluation->bottleneck_s, 6e-3, 1e-12);
    EXPECT_NEAR(evaluation->imbalance, 0, 1e-12);
  }
}

TEST(Evaluate, ImbalanceIsOfWorkOverSpeed) {
  const cost::ModelCost model = equal_model(6, 1e-3);
  cost::Cluster cluster = cost::equal_ranks(3);
  cluster.ranks[1].speed = 2;
  const auto even = evaluate(make_plan({2, 2, 2}, ScheduleKind::k1F1B), {model, cluster, 8});
  EXPECT_NEAR(even->imbalance, 2.0 / (5.0 / 3) - 1, 1e-9);
  EXPECT_NEAR(even->ideal_step_time_s, 8 * 18e-3 / 4, 1e-12);
  EXPECT_EQ(even->stage_time_s.size(), 3U);
  EXPECT_NEAR(even->stage_time_s[1], 3e-3, 1e-12);
}

TEST(Evaluate, TheFrozenPrefixRunsForwardOnlyAndHoldsNoStash) {
  cost::ModelCost model = equal_model(4, 1e-3);
  model.layers[0].frozen = model.layers[1].frozen = model.layers[2].frozen = true;
  const auto costs = stage_costs(make_plan({2, 2}, ScheduleKind::k1F1B), model);
  EXPECT_EQ(costs[0].forward, std::chrono::milliseconds(2));
  EXPECT_EQ(costs[0].input_gradient.count(), 0);
  EXPECT_EQ(costs[0].weight_gradient.count(), 0);
  EXPECT_EQ(costs[0].activation, Bytes{0});
  EXPECT_EQ(costs[0].state, Bytes{2000});
  EXPECT_EQ(costs[1].input_gradient, std::chrono::milliseconds(1));
  EXPECT_EQ(costs[1].activation, Bytes{100});
  EXPECT_EQ(costs[1].state, Bytes{5000});
}

// The reduction of stage 0, whose last W ends the schedule, is exposed; that of stage 1 is hidden.
TEST(Evaluate, ReplicasAddTheReductionOfTheGradients) {
  const cost::ModelCost model = equal_model(4, 1e-3);  // gradients of 1000 bytes a layer
  const Plan plan = make_plan({2, 2}, ScheduleKind::k1F1B);
  cost::Cluster cluster = cost::equal_ranks(2);
  const double alone = evaluate(plan, {model, cluster, 4})->step_time_s;
  cluster.between_replicas = {.latency_s = 1e-4, .bandwidth_bytes_per_s = 1e6};
  EXPECT_EQ(evaluate(plan, {model, cluster, 4})->step_time_s, alone);  // one replica
  cluster.replicas = 4;
  // A ring: 2 (D - 1) rounds of latency + bytes / D / bandwidth.
  const double reduction = 2 * 3 * (1e-4 + 2000.0 / 4 / 1e6);
  EXPECT_NEAR(evaluate(plan, {model, cluster, 4})->step_time_s, alone + reduction, 1e-8);
  // Frozen layers have no gradients to sum.
  cost::ModelCost frozen = model;
  frozen.layers[0].frozen = true;
  const auto costs = stage_costs(plan, frozen, cluster);
  EXPECT_NEAR(to_seconds(costs[0].reduction), 2 * 3 * (1e-4 + 1000.0 / 4 / 1e6), 1e-8);
  cluster.replicas = 0;
  EXPECT_FALSE(evaluate(plan, {model, cluster, 4}));
}

TEST(Evaluate, MemoryOfTheReplayIsWhatTheBalancerReckonsWith) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({0x3E3, seed}));
    const cost::ModelCost model = whole_number_model(rng, pick(rng, 1, 12));
    const int ranks = pick(rng, 1, std::min(5, model.size()));
    const cost::Cluster cluster = cost::equal_ranks(ranks);
    const int micro_batches = pick(rng, 1, 7);
    const auto kind = pick(rng, 0, 1) == 0 ? ScheduleKind::k1F1B : ScheduleKind::kGpipe;
    const auto counts = balance(Balancer::kOptimal, {{model, cluster, micro_batches}, kind});
    const Plan plan = make_plan(*counts, kind);
    const auto evaluation = evaluate(plan, {model, cluster, micro_batches});
    ASSERT_TRUE(evaluation) << evaluation.error().message << ", seed " << seed;
    const auto costs = stage_costs(plan, model);
    const auto shape = shape_of(plan, micro_batches, model.frozen_layers());
    const auto limits = in_flight(kind, schedule::loop_placement(ranks, 1), ranks, micro_batches);
    for (int s = 0; s < ranks; ++s) {
      const auto i = static_cast<std::size_t>(s);
      const int expected = shape.stages[i].frozen ? 0 : (*limits)[i];
      ASSERT_EQ(evaluation->in_flight[i], expected) << "seed " << seed << ", stage " << s;
      ASSERT_EQ(evaluation->result.ranks[i].peak_memory,
                costs[i].state + costs[i].activation * std::int64_t{expected})
          << "seed " << seed << ", stage " << s;
    }
  }
}

TEST(Evaluate, WhatDoesNotFitTogetherIsNamed) {
  const cost::ModelCost model = equal_model(6, 1e-3);
  const Plan plan = make_plan({3, 3}, ScheduleKind::k1F1B);
  const auto message = [](const Expected<Evaluation>& result) {
    EXPECT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kBadInput);
    return result.error().message;
  };
  EXPECT_NE(message(evaluate(plan, {equal_model(5, 1), cost::equal_ranks(2), 4})).find("6 layers"),
            std::string::npos);
  EXPECT_NE(message(evaluate(plan, {model, cost::equal_ranks(3), 4})).find("2 ranks"),
            std::string::npos);
  EXPECT_NE(message(evaluate(plan, {model, cost::equal_ranks(2), 0})).find("micro-batches"),
            std::string::npos);
  EXPECT_NE(message(evaluate(plan, {equal_model(6, 1e6), cost::equal_ranks(2), 1000})).find("4e9"),
            std::string::npos);
}

TEST(Evaluate, ThePlanFileReadsBackAsThePlan) {
  const cost::ModelCost model = equal_model(6, 1e-3);
  const Plan plan = make_plan({1, 3, 2}, ScheduleKind::kGpipe, 4);
  const auto evaluation = evaluate(plan, {model, cost::equal_ranks(3), 8});
  const Json json = plan_json(plan, *evaluation, model, "optimal",
                              difference(make_plan({2, 2, 2}, ScheduleKind::kGpipe), plan, model));
  EXPECT_EQ(json["migration"]["layers"], 1);
  EXPECT_EQ(json["migration"]["bytes"], 3000);
  EXPECT_EQ(json["stages"][1]["first_layer"], 1);
  EXPECT_EQ(json["stages"][1]["in_flight"], 8);
  EXPECT_EQ(json["stages"][1]["memory_bytes"], 3 * (4000 + 8 * 100));
  EXPECT_EQ(json["peak_activation_bytes"], 3 * 8 * 100);
  const auto again = parse_json(json.dump(), "plan.json");
  const auto read = parse_plan(*again, "plan.json");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, plan);
}

TEST(Evaluate, FaultyPlanFilesAreRefusedWithAPointer) {
  const auto error = [](std::string_view text) {
    const auto read = parse_plan(*parse_json(text, "plan.json"), "plan.json");
    return read ? "none" : read.error().message;
  };
  const std::string head = R"({"format": "dynmo-plan-1", "schedule": "1f1b", "ranks": 2, )";
  EXPECT_EQ(error(head + R"("stages": []})"),
            "plan.json: /stages have 0 layers, wanted 1 to 2^31 - 1");
  EXPECT_EQ(error(head + R"("stages": [{"stage": 0, "rank": 0, "first_layer": 1, "layers": 1}]})"),
            "plan.json: /stages: stage 0 starts at layer 1, wanted 0: stages follow one another "
            "without gap or overlap");
  EXPECT_EQ(error(head + R"("stages": [{"stage": 0, "rank": 0, "first_layer": 0, "layer": 1}]})"),
            "plan.json: /stages/0/layers is missing");
  EXPECT_EQ(error(head + R"("stages": [{"stage": 1, "rank": 0, "first_layer": 0, "layers": 1}]})"),
            "plan.json: /stages/0/stage is out of order, wanted 0");
  EXPECT_NE(error(R"({"format": "dynmo-plan-1", "schedule": "2f2b", "ranks": 1, "stages": []})")
                .find("/schedule"),
            std::string::npos);
  EXPECT_NE(error(R"({"format": "dynmo-plan-1", "schedule": "1f1b", "ranks": 99999999,
                      "stages": []})")
                .find("/ranks is 99999999"),
            std::string::npos);
}

TEST(Evaluate, DamagedPlanFilesAreReadOrRefused) {
  const cost::ModelCost model = equal_model(6, 1e-3);
  const Plan plan = make_plan({1, 3, 2}, ScheduleKind::k1F1B, 4);
  const std::string good =
      plan_json(plan, *evaluate(plan, {model, cost::equal_ranks(3), 8}), model, "time").dump();
  int read = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Rng rng(mix_key({0xDA3A9E, seed}));
    std::string text = good;
    constexpr std::string_view kLikely = "0123456789-,:{}[]\"e";
    for (auto edits = 1 + rng.below(3); edits > 0; --edits) {
      text[rng.below(text.size())] = kLikely[rng.below(kLikely.size())];
    }
    const auto json = parse_json(text, "damaged");
    if (!json) continue;
    const auto found = parse_plan(*json, "damaged");
    if (!found) continue;
    ++read;
    ASSERT_TRUE(validate(*found, found->layers())) << "seed " << seed;
  }
  EXPECT_GT(read, 50);
}

TEST(SimulatedOptimum, EqualsReplayingEveryCut) {
  int infeasible = 0;
  std::int64_t simulated = 0;
  std::int64_t all = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Rng rng(mix_key({0xBE57, seed}));
    const int layers = pick(rng, 1, 9);
    const cost::ModelCost model =
        seed % 2 == 0 ? random_model(rng, layers) : whole_number_model(rng, layers);
    cost::Cluster cluster = cost::equal_ranks(pick(rng, 1, std::min(layers, 4)));
    for (auto& rank : cluster.ranks) {
      if (seed % 3 == 0) rank.speed = 0.3 + rng.uniform();
      if (seed % 5 == 0) rank.memory = Bytes{pick(rng, 20, 250)};
    }
    if (seed % 4 == 0) cluster.inside_node = {1e-4, 1e5};
    const int micro_batches = pick(rng, 1, 8);
    const auto kind = std::array{ScheduleKind::k1F1B, ScheduleKind::kGpipe,
                                 ScheduleKind::kZbH1}[static_cast<std::size_t>(pick(rng, 0, 2))];
    std::optional<double> least;
    std::vector<int> best;
    for_each_cut(layers, cluster.size(), [&](const std::vector<int>& counts) {
      ++all;
      const auto found = evaluate(make_plan(counts, kind), {model, cluster, micro_batches});
      ASSERT_TRUE(found) << found.error().message;
      if (!fits_memory(found->result, cluster)) return;
      if (!least || found->step_time_s < *least) {
        least = found->step_time_s;
        best = counts;
      }
    });
    const auto found = simulated_optimum({model, cluster, micro_batches}, kind);
    ASSERT_EQ(found.has_value(), least.has_value()) << "seed " << seed;
    if (!found) {
      ASSERT_EQ(found.error().code, ErrorCode::kInfeasible);
      ++infeasible;
      continue;
    }
    ASSERT_TRUE(found->has_value()) << "seed " << seed;
    simulated += (*found)->simulated;
    ASSERT_EQ((*found)->step_time_s, *least) << "seed " << seed;
    ASSERT_EQ((*found)->plan, make_plan(best, kind)) << "seed " << seed;
    ASSERT_LE(*step_time_bound_s({model, cluster, micro_batches}), *least) << "seed " << seed;
  }
  EXPECT_GT(infeasible, 10);
  EXPECT_LT(simulated, all);  // the bound rules cuts out
}

TEST(SimulatedOptimum, TheBoundLeavesFewOfManyCuts) {
  for (const double frozen : {0.0, 0.5}) {
    Rng rng(11);
    cost::ModelCost model = random_model(rng, 20);
    for (std::size_t i = 0; i < 20; ++i)
      model.layers[i].frozen = static_cast<double>(i) < 20 * frozen;
    const auto best = simulated_optimum({model, cost::equal_ranks(4), 16}, ScheduleKind::k1F1B);
    ASSERT_TRUE(best && *best);
    EXPECT_LT((*best)->simulated, 200);  // of 969
  }
}

TEST(SimulatedOptimum, IsUnknownOfTooManyCutsWhichABoundIsNot) {
  const cost::ModelCost model = equal_model(64, 1e-3);
  const cost::Cluster cluster = cost::equal_ranks(16);
  const auto best = simulated_optimum({model, cluster, 4}, ScheduleKind::k1F1B);
  ASSERT_TRUE(best);
  EXPECT_FALSE(best->has_value());
  const auto even =
      evaluate(make_plan(std::vector<int>(16, 4), ScheduleKind::k1F1B), {model, cluster, 4});
  const auto bound = step_time_bound_s({model, cluster, 4});
  ASSERT_TRUE(even && bound);
  EXPECT_NEAR(*bound, 4 * even->bottleneck_s, 1e-5 * *bound);
  EXPECT_LT(*bound, even->step_time_s);
}

}  // namespace
}  // namespace dynmo::plan
