// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "dynmo/scenario/job.h"
#include "dynmo/scenario/report.h"
#include "dynmo/scenario/run.h"

namespace dynmo::scenario {
namespace {

// 32 blocks of a mixture of depths, whose head is heavier than a rank's share of the rest.
Scenario depths(int ranks, std::int64_t head_slices) {
  Scenario scenario;
  scenario.model.shape.blocks = 32;
  scenario.model.shape.head_slices = head_slices;
  scenario.cluster.pipeline_ranks = ranks;
  scenario.dynamism.source = "mixture-of-depths";
  scenario.training.steps = 20;
  scenario.policy.compare = {"optimal", "optimal+pack"};
  return scenario;
}

Comparison compared(const Scenario& scenario) {
  const auto job = make_job(scenario);
  EXPECT_TRUE(job) << job.error().message;
  auto comparison = compare(*job, scenario.policy.compare);
  EXPECT_TRUE(comparison) << comparison.error().message;
  return *std::move(comparison);
}

// Packing without slack frees no rank here, and nothing else would say that two are of little use.
TEST(ScenarioAdvice, NamesFewerRanksAndHeadSlicesThatRunsOfThemConfirm) {
  const Scenario scenario = depths(8, 1);
  const Comparison comparison = compared(scenario);
  EXPECT_EQ(comparison.runs[1].average_ranks, 8);
  ASSERT_TRUE(comparison.advice);
  const plan::Advice& advice = *comparison.advice;
  // The costs of the steps between those that advice looks at are a little different.
  const auto same = [](double given_s, double run_s) {
    return std::abs(given_s / run_s - 1) < 0.005;
  };
  EXPECT_TRUE(same(advice.all.step_s, comparison.runs[0].step_time_s));
  ASSERT_TRUE(advice.fewest);
  EXPECT_EQ(advice.fewest->ranks, 6);
  const double on_six_s = compared(depths(6, 1)).runs[0].step_time_s;
  EXPECT_TRUE(same(advice.fewest->step_s, on_six_s));
  EXPECT_LE(on_six_s, 1.02 * advice.best_s);
  EXPECT_GT(compared(depths(5, 1)).runs[0].step_time_s, 1.02 * advice.best_s);
  EXPECT_EQ(advice.limit, plan::StepLimit::kHead);
  ASSERT_TRUE(advice.remedy);
  EXPECT_EQ(advice.remedy->key, plan::AdviceKey::kHeadSlices);
  const double sliced_s = compared(depths(8, std::stoll(advice.remedy->value))).runs[0].step_time_s;
  EXPECT_TRUE(same(advice.remedy->step_s, sliced_s));
  EXPECT_LT(sliced_s, 0.85 * advice.all.step_s);

  const std::string text = report(scenario, comparison);
  EXPECT_NE(text.find("With balancer optimal 6 of 8 ranks are enough: a step takes "),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("; model.head_slices = " + advice.remedy->value + " would take "),
            std::string::npos);
  EXPECT_NE(text.find(" tokens a GPU-hour, "), std::string::npos);
  const Json json = comparison_json(scenario, comparison)["advice"];
  EXPECT_EQ(json["fewest"]["ranks"], 6);
  EXPECT_EQ(json["remedy"]["key"], "head_slices");
  const RunResult& run = comparison.runs[0];
  EXPECT_TRUE(
      same(json["all"]["tokens_per_rank_hour"].get<double>(),
           run.tokens / static_cast<double>(scenario.training.steps) / run.step_time_s * 3600 / 8));
}

TEST(ScenarioAdvice, SaysNothingOfFewerRanksWhereTheyComeAndGo) {
  Scenario scenario = depths(8, 1);
  scenario.policy.compare = {"optimal"};
  scenario.events = {{.step = 5, .leave = {7}}};
  const Comparison comparison = compared(scenario);
  ASSERT_TRUE(comparison.advice);
  EXPECT_FALSE(comparison.advice->fewest);
  EXPECT_FALSE(comparison_json(scenario, comparison)["advice"].contains("fewest"));
}

}  // namespace
}  // namespace dynmo::scenario
