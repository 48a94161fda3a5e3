// SPDX-License-Identifier: Apache-2.0
#include "dynmo/scenario/run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/plan/evaluate.h"
#include "dynmo/scenario/grid.h"
#include "dynmo/scenario/planning_impl.h"
#include "dynmo/scenario/report.h"
#include "dynmo/sim/simulate.h"
#include "tests/scenario/freezing_job.h"

namespace dynmo::scenario {
namespace {

// (M + P - 1) x (F + B) of a stage: 1F1B of equal stages.
constexpr double kStep = (8 + 4 - 1) * 2 * 3e-3;

TEST(Run, ConstantLoadsTakeStepsTimesTheClosedForm) {
  const RunResult run = result_of(job_of(free_scenario()), "uniform");
  EXPECT_NEAR(run.time.total_s(), 20 * kStep, 1e-9);
  EXPECT_NEAR(run.step_time_s, kStep, 1e-9);
  EXPECT_NEAR(run.bubble, 3.0 / 11, 1e-9);
  EXPECT_NEAR(run.imbalance, 0, 1e-12);
  EXPECT_NEAR(run.average_ranks, 4, 1e-9);
  EXPECT_EQ(run.gpu_hours_saved, 0);
  EXPECT_NEAR(run.tokens_per_s(), 8 * 100 / kStep, 1e-6);
  EXPECT_EQ(run.plans + run.migrations + run.layers_moved, 0);
}

TEST(Run, ReplanningAStaticLoadCostsItsOverheadAndNoMore) {
  Scenario s = free_scenario();
  s.training.steps = 500;
  s.policy.profile_share = 0.01;
  s.policy.plan_s = 0.5;
  s.policy.move_fixed_s = 0.1;
  const RunResult run = result_of(job_of(s), "optimal");
  EXPECT_NEAR(run.time.train_s, 500 * kStep, 1e-6);
  EXPECT_NEAR(run.time.profile_s, 0.01 * 500 * kStep, 1e-6);
  EXPECT_EQ(run.migrations, 0);
  EXPECT_LE(run.plans, 3) << "noise of 2 % is no change";
  EXPECT_NEAR(run.time.total_s(), run.time.train_s + run.time.profile_s + run.time.plan_s, 1e-9);
}

// After the freeze the even cut has 4 layers that only run forward on ranks 0 and 1.
TEST(Run, ReplansWhenLayersFreezeAndWinsOverStaticCuts) {
  Scenario s = free_scenario();
  s.training.steps = 200;
  const Job job = job_of(s, {.layers = 16, .frozen_from = 50, .frozen = 8});
  const RunResult uniform = result_of(job, "uniform");
  const RunResult first_cut = result_of(job, "static:optimal");
  const RunResult replanned = result_of(job, "optimal");
  EXPECT_EQ(replanned.migrations, 1);
  EXPECT_GT(replanned.layers_moved, 0);
  EXPECT_NEAR(first_cut.time.total_s(), uniform.time.total_s(), 1e-9);
  EXPECT_GT(uniform.time.total_s(), 1.1 * replanned.time.total_s());
  EXPECT_LT(replanned.imbalance, uniform.imbalance);
}

// The four denominators of docs/reproduce.md. FreezingLoad is costly behind, once its front froze.
TEST(Run, DensePoliciesTrainOrCutForTheModelWithoutItsDynamism) {
  Scenario s = free_scenario();
  s.training.steps = 100;
  const Job job = job_of(s, {.layers = 16, .frozen_from = 0, .frozen = 8});
  const Comparison c =
      compare(job, {"dense:optimal", "static:dense:optimal", "static:optimal"}).value();
  EXPECT_EQ(c.runs[0].name, "dense:optimal");
  EXPECT_EQ(c.runs[0].step_time_s, c.dense.step_time_s) << "equal layers: the even cut is the best";
  EXPECT_EQ(c.runs[1].step_time_s, c.uniform.step_time_s) << "the best cut of equal layers, kept";
  EXPECT_LT(c.runs[2].step_time_s, c.runs[1].step_time_s);
  EXPECT_EQ(parse_policy("dense:optimel").error().message,
            "policy 'dense:optimel': balancer 'optimel' is not known, did you mean 'optimal'?");
}

// Exits have heads of their own: in slices they are layers that the dense model lacks.
TEST(Run, TheDenseModelsCutHoldsTheSlicesOfExitsToo) {
  const auto scenario = parse_scenario(R"(
[model]
blocks = 8
head_slices = 4
[cluster]
pipeline_ranks = 4
[dynamism]
source = "early-exit"
[early_exit]
warm_up = 0
[training]
steps = 3
)",
                                       "exits.toml");
  ASSERT_TRUE(scenario) << scenario.error().message;
  const Job job = make_job(*scenario).value();
  ASSERT_GT(job.load->at(0).size(), job.dense->at(0).size());
  for (const char* balancer : {"blocks", "optimal", "search"}) {
    const auto c = compare(job, {fmt::format("static:dense:{}", balancer)});
    ASSERT_TRUE(c) << balancer << ": " << c.error().message;
    EXPECT_GT(c->runs[0].step_time_s, 0) << balancer;
  }
  const cost::ModelCost dense = job.dense->at(0);
  const cost::ModelCost model = job.load->at(0);
  const plan::Plan plan =
      with_layers_of(plan::make_plan({4, 5, 6, 6}, schedule::ScheduleKind::k1F1B), dense, model);
  ASSERT_TRUE(plan::validate(plan, model.size()));
  ASSERT_EQ(plan.stages.size(), 4U);
  // The exit behind block 3, blocks.3.mlp and 3 layers more, is the end of the second stage.
  EXPECT_EQ(model.layers[8].name, "blocks.3.mlp");
  for (std::size_t i = 0, d = 0; i < model.layers.size(); ++i) {
    const bool extra = model.layers[i].name.find(".exit.") != std::string::npos;
    const LayerId in_dense(static_cast<int>(extra ? d - 1 : d++));
    EXPECT_EQ(plan.owner(LayerId(static_cast<int>(i))),
              plan::make_plan({4, 5, 6, 6}, schedule::ScheduleKind::k1F1B).owner(in_dense))
        << model.layers[i].name;
  }
}

// 8 of 16 layers freeze at step 95, in the middle of the last tenth of 100 steps.
TEST(Run, TheEndAndTheLeastOfAStepAreMeans) {
  Scenario s = free_scenario();
  s.training.steps = 100;
  const RunResult run =
      result_of(job_of(s, {.layers = 16, .frozen_from = 95, .frozen = 8}), "uniform");
  constexpr double kDense = 8 * 16 * 3e-3 / 4;
  constexpr double kFrozen = 8 * (8 * 1e-3 + 8 * 3e-3) / 4;
  EXPECT_NEAR(run.ideal_step_time_s, 0.95 * kDense + 0.05 * kFrozen, 1e-9);
  EXPECT_NEAR(run.end.ideal_step_time_s, (kDense + kFrozen) / 2, 1e-9);
  EXPECT_GT(run.end.step_time_s, run.end.ideal_step_time_s);
  EXPECT_NEAR(run.step_time_s * 100, 90 * 2 * kStep + 10 * run.end.step_time_s, 1e-9);
}

TEST(Run, RefusesAnEventThatTakesAllRanksThatThePolicyKept) {
  Scenario s = free_scenario();
  s.policy.pack_slack = 10;
  s.policy.release_after = 2;
  s.training.steps = 40;
  for (const bool failure : {false, true}) {
    for (const std::vector<std::int64_t>& leaving : {std::vector<std::int64_t>{0}, {0, 1, 2}}) {
      s.events = {{.step = 30, .leave = leaving, .failure = failure}};
      const Job job = job_of(s, {.layers = 12});
      const auto refused = run(job, *job.load, parse_policy("optimal+pack").value());
      ASSERT_FALSE(refused);
      EXPECT_EQ(refused.error().code, ErrorCode::kInfeasible) << refused.error().message;
      EXPECT_NE(refused.error().message.find("event.leave at step 30"), std::string::npos);
    }
  }
}

TEST(Run, ChargesMovesAndRefusesThoseThatDoNotPay) {
  Scenario s = free_scenario();
  s.training.steps = 200;
  s.policy.move_fixed_s = 0.25;
  s.policy.move_bandwidth = 1e5;
  s.policy.plan_s = 0.125;
  const JobOptions options{.layers = 16, .frozen_from = 50, .frozen = 8};
  const RunResult run = result_of(job_of(s, options), "optimal");
  ASSERT_EQ(run.migrations, 1);
  // Training stands still for the gradients; of a frozen layer only parameters move.
  const double trained = (run.bytes_moved - 1e3 * static_cast<double>(run.layers_moved)) / 3e3;
  EXPECT_GT(trained, 0);
  EXPECT_NEAR(run.time.move_s, 0.25 + 2e3 * trained / 1e5, 1e-9);
  // It stands still for all where the memory does not hold a layer more.
  s.cluster.memory = Bytes{26'000};
  const RunResult at_once = result_of(job_of(s, options), "optimal");
  ASSERT_EQ(at_once.migrations, 1);
  EXPECT_EQ(at_once.bytes_moved, run.bytes_moved);
  EXPECT_NEAR(at_once.time.move_s, 0.25 + run.bytes_moved / 1e5, 1e-9);
  EXPECT_LT(at_once.time.train_s, run.time.train_s) << "a step less under the plan before";
  s.cluster.memory = {};
  EXPECT_NEAR(run.time.plan_s, 0.125 * static_cast<double>(run.plans), 1e-9);
  s.policy.move_fixed_s = 1000;
  EXPECT_EQ(result_of(job_of(s, options), "optimal").migrations, 0);
}

TEST(Run, PartsAddUpToTheWhole) {
  Scenario s = free_scenario();
  s.training.steps = 100;
  s.training.checkpoint_every = 7;
  s.policy.profile_share = 0.01;
  s.policy.plan_s = 0.01;
  s.policy.move_fixed_s = 0.1;
  s.policy.move_bandwidth = 1e6;
  s.events = {{.step = 30, .leave = {3}},
              {.step = 60, .leave = {0}, .failure = true},
              {.step = 80, .join = {0, 3}}};
  const Job job = job_of(s, {.layers = 16, .frozen_from = 50, .frozen = 8});
  const Comparison c = compare(job, {"uniform", "static:time", "optimal"}).value();
  for (const RunResult* run : {&c.dense, &c.uniform, &c.runs[1], &c.runs[2]}) {
    const TimeSpent& t = run->time;
    EXPECT_EQ(t.total_s(), t.train_s + t.lost_s + t.profile_s + t.plan_s + t.move_s + t.restart_s);
    EXPECT_NEAR(run->step_time_s * 100, t.train_s, 1e-9) << run->name;
    EXPECT_EQ(run->micro_batches, 100 * 8) << run->name;
    EXPECT_GT(run->average_ranks, 2);
    EXPECT_LT(run->average_ranks, 4);
  }
  const Json json = comparison_json(s, c);
  for (const Json& run : json["runs"]) {
    double shares = run["time_s"]["train"].get<double>() / run["time_s"]["total"].get<double>();
    for (const auto& [part, share] : run["overhead"].items()) shares += share.get<double>();
    EXPECT_NEAR(shares, 1, 1e-12) << run["name"];
  }
}

TEST(Run, RanksThatLeaveAndComeBackChangeTheAverage) {
  Scenario s = free_scenario();
  const double four = result_of(job_of(s, {.layers = 12}), "uniform").step_time_s;
  Scenario fewer = s;
  fewer.cluster.pipeline_ranks = 3;
  const double three = result_of(job_of(fewer, {.layers = 12}), "uniform").step_time_s;
  s.events = {{.step = 10, .leave = {1}}};
  const RunResult left = result_of(job_of(s, {.layers = 12}), "optimal");
  EXPECT_NEAR(left.time.total_s(), 10 * four + 10 * three, 1e-9);
  EXPECT_NEAR(left.average_ranks, (10 * four * 4 + 10 * three * 3) / (10 * four + 10 * three),
              1e-9);
  EXPECT_EQ(left.migrations, 1);
  // Five steps on three ranks, then the fourth is back; layers move to it while a sixth runs.
  s.events.push_back({.step = 15, .join = {1}});
  s.training.steps = 100;
  const RunResult back = result_of(job_of(s, {.layers = 12}), "optimal");
  EXPECT_EQ(back.migrations, 2);
  EXPECT_NEAR(back.time.total_s(), 94 * four + 6 * three, 1e-9);
  // A static job restarts on three ranks, and stays there.
  const RunResult kept = result_of(job_of(s, {.layers = 12}), "uniform");
  EXPECT_NEAR(kept.time.total_s(), 10 * four + 90 * three + s.training.restart_s, 1e-9);
}

TEST(Run, AFailureLosesTheStepsSinceTheCheckpoint) {
  Scenario s = free_scenario();
  s.training.checkpoint_every = 4;
  s.training.restart_s = 3;
  s.events = {{.step = 10, .failure = true}};
  const RunResult run = result_of(job_of(s), "uniform");
  EXPECT_EQ(run.steps_lost, 2);
  EXPECT_NEAR(run.time.lost_s, 2 * kStep, 1e-9);
  EXPECT_NEAR(run.time.train_s, 20 * kStep, 1e-9);
  EXPECT_EQ(run.time.restart_s, 3);
  EXPECT_EQ(run.micro_batches, 20 * 8);
  s.training.checkpoint_every = 0;  // only the start
  EXPECT_EQ(result_of(job_of(s), "uniform").steps_lost, 10);
}

// The order of an adaptive plan that was made after layers froze runs on, with their backward
// behind all others, until it is replaced.
TEST(Run, AFailureThatThawsLayersReplacesAnAdaptivePlan) {
  Scenario s = free_scenario();
  s.training.schedule = "adaptive";
  s.training.checkpoint_every = 8;
  s.events = {{.step = 14, .failure = true}};
  const RunResult run = result_of(job_of(s, {.frozen_from = 10, .frozen = 4}), "optimal");
  EXPECT_EQ(run.steps_lost, 6);
  EXPECT_GE(run.migrations, 3);  // frozen, thawed, frozen again
}

// The last stage to end is the first, and its gradients are summed then.
TEST(Run, ReplicasAddTheReductionAndTheirTokens) {
  Scenario s = free_scenario();
  s.cluster.data_parallel = 3;
  s.cluster.inside_bandwidth = s.cluster.between_bandwidth = 2e6;
  const RunResult run = result_of(job_of(s), "uniform");
  const cost::Link link{.latency_s = 0, .bandwidth_bytes_per_s = 2e6};
  const double tail = to_seconds(sim::all_reduce_time(Bytes{4000}, 3, link));
  EXPECT_NEAR(tail, 2 * 2.0 / 3 * 4000 / 2e6, 1e-8);
  EXPECT_NEAR(run.step_time_s, kStep + tail, 1e-9);
  EXPECT_EQ(run.micro_batches, 20 * 8 * 3);
  EXPECT_NEAR(run.average_ranks, 12, 1e-9);
}

// Everybody waits for the replica with the slow rank.
TEST(Run, TheSlowestReplicaSetsThePace) {
  Scenario s = free_scenario();
  s.cluster.slow_ranks = {2};
  s.cluster.slow_speed = 0.5;
  const double alone = result_of(job_of(s), "uniform").step_time_s;
  EXPECT_GT(alone, 1.5 * kStep);
  s.cluster.data_parallel = 5;
  const RunResult run = result_of(job_of(s), "uniform");
  EXPECT_NEAR(run.step_time_s, alone, 1e-9);
  // 4 replicas are busy for 24 ms of work x 8 layers, the fifth for half as much again on one rank.
  const double busy = 8 * 3e-3 * (4 * 8 + 6 + 2 * 2);
  EXPECT_NEAR(run.bubble, 1 - busy / (20 * alone), 1e-9);
}

// A plan is judged by the time that a step takes: the reduction is in both.
TEST(Grid, ThePlanKnowsOfTheReduction) {
  Scenario s = free_scenario();
  s.cluster.data_parallel = 3;
  s.cluster.inside_bandwidth = s.cluster.between_bandwidth = 1e6;
  const Job job = job_of(s);
  const Grid grid = make_grid(s.cluster, job.device, 3).value();
  EXPECT_EQ(grid.planned.replicas, 3);
  EXPECT_EQ(grid.planned.between_replicas.bandwidth_bytes_per_s, 1e6);
  const auto plan =
      plan::make_plan({2, 2, 2, 2}, schedule::parse_schedule_kind(s.training.schedule).value());
  const auto evaluation =
      plan::evaluate(plan, {job.load->at(0), grid.planned, s.training.micro_batches});
  ASSERT_TRUE(evaluation) << evaluation.error().message;
  EXPECT_NEAR(result_of(job, "uniform").step_time_s, evaluation->step_time_s, 1e-9);
}

TEST(Run, ReplicasThatComeAndGoChangeTokensAndRanks) {
  Scenario s = free_scenario();
  s.cluster.data_parallel = 4;
  s.events = {{.step = 10, .replicas = 2}};
  const RunResult run = result_of(job_of(s), "uniform");
  EXPECT_EQ(run.micro_batches, 8 * (10 * 4 + 10 * 2));
  EXPECT_NEAR(run.average_ranks, 4 * 3, 1e-9);
  EXPECT_EQ(run.bytes_moved, 0);
  s.events.push_back({.step = 15, .replicas = 3});
  EXPECT_EQ(result_of(job_of(s), "uniform").bytes_moved, 8 * 4000);  // one replica's whole state
}

TEST(Run, SamplingLessOftenChangesNothingWhereOnlyKnownChangesHappen) {
  Scenario s = free_scenario();
  s.training.steps = 100;
  const JobOptions options{.layers = 16, .frozen_from = 53, .frozen = 8};
  const RunResult every = result_of(job_of(s, options), "uniform");
  s.training.sample_every = 10;
  EXPECT_EQ(result_of(job_of(s, options), "uniform").time.total_s(), every.time.total_s());
}

TEST(Run, TwoRunsPrintTheSame) {
  Scenario s = free_scenario();
  s.training.steps = 100;
  const Job job = job_of(s, {.layers = 16, .frozen_from = 50, .frozen = 8});
  const auto text = [&] {
    const Comparison c = compare(job, {"uniform", "time", "optimal"}).value();
    return report(s, c) + comparison_json(s, c).dump();
  };
  EXPECT_EQ(text(), text());
  Scenario other = s;
  other.training.seed = 2;
  EXPECT_NE(text(), "");
}

TEST(Run, InfeasibleMemoryIsAnErrorAndTheBaselineSaysSo) {
  Scenario s = free_scenario();
  s.cluster.memory = Bytes{1000};
  const Job job = job_of(s);
  EXPECT_EQ(result_of(job, "uniform").steps_over_memory, 20);
  const auto result = run(job, *job.load, parse_policy("optimal").value());
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code, ErrorCode::kInfeasible);
}

// Rank 0 holds the state of two layers, four stashes of its first one and what its second forward
// brings back; in zb-h1, where gradients are apart, too.
TEST(Run, MemoryCountsWhatASecondForwardBringsBack) {
  Scenario s = free_scenario();
  s.training.schedule = "1f1b";
  s.training.recompute = "whole";
  s.cluster.memory = Bytes{2 * 6000 + 4 + 1};
  EXPECT_EQ(result_of(job_of(s), "uniform").steps_over_memory, 0);
  // A stage's stashes stay from I to W.
  s.training.schedule = "zb-h1";
  EXPECT_EQ(result_of(job_of(s), "uniform").steps_over_memory, 20);
  s.training.schedule = "1f1b";
  s.cluster.memory -= Bytes{1};
  EXPECT_EQ(result_of(job_of(s), "uniform").steps_over_memory, 20);
}

// Five equal layers: the slowest rank has two of them on three ranks as on four, and the fill is a
// little longer.
TEST(Run, PackingReleasesRanksThatDoNotHelp) {
  Scenario s = free_scenario();
  s.training.steps = 100;
  s.policy.noise = 0;
  s.policy.pack_slack = 0.1;
  const Job job = job_of(s, {.layers = 5});
  const RunResult all = result_of(job, "optimal");
  const RunResult packed = result_of(job, "optimal+pack");  // 2|1|1|1 and 2|2|1
  EXPECT_NEAR(all.average_ranks, 4, 1e-9);
  EXPECT_EQ(all.gpu_hours_saved, 0);
  EXPECT_LT(packed.average_ranks, 3.1);
  EXPECT_LE(packed.time.total_s(), all.time.total_s() * 1.1);
  // The fourth one waits ten steps without layers before it is given back.
  ASSERT_EQ(packed.migrations, 1);
  const auto move = std::ranges::find_if(packed.decisions,
                                         [](const DecisionAt& at) { return at.decision.migrate; });
  const auto idle = static_cast<double>(s.training.steps - move->step);
  const double not_in_use = (4 - packed.average_ranks) * packed.time.total_s() / 3600;
  EXPECT_NEAR(packed.gpu_hours_saved, not_in_use * (idle - 11) / idle, 0.002 * not_in_use);
}

// Search is never worse than the even cut, in a run as in a plan.
TEST(Run, SearchedPlansRunInScenarios) {
  Scenario s = free_scenario();
  s.policy.evaluations = 200;
  const Job job = job_of(s, {.layers = 16, .frozen_from = 10, .frozen = 8});
  const RunResult uniform = result_of(job, "uniform");
  EXPECT_LE(result_of(job, "static:search").step_time_s, uniform.step_time_s);
  EXPECT_LT(result_of(job, "search").step_time_s, uniform.step_time_s);
}

TEST(Run, TraceHasTheLastStepsOfEveryRun) {
  const Job job = job_of(free_scenario());
  const Comparison c = compare(job, {"uniform", "optimal"}, {.trace_steps = 2}).value();
  const auto processes = trace_of(c);
  ASSERT_EQ(processes.size(), 3U);
  for (const auto& process : processes) {
    ASSERT_EQ(process.steps.size(), 2U) << process.name;
    EXPECT_EQ(process.steps[0].step, 18);
    EXPECT_EQ(process.steps[0].timeline.ranks.size(), 4U);
  }
}

}  // namespace
}  // namespace dynmo::scenario
