// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>

#include "dynmo/scenario/report.h"
#include "dynmo/scenario/run.h"
#include "tests/scenario/freezing_job.h"

namespace dynmo::scenario {
namespace {

// Keeping the first plan gains nothing, and the best plan of every step gains all: a re-planning
// run that answers a known change at once takes all of it with its steps, and less with its
// charges.
TEST(Shares, SayWhatReplanningGainedOfWhatItCan) {
  Scenario s = free_scenario();
  s.training.steps = 200;
  s.policy.noise = 0;
  s.policy.plan_s = 0.01;
  const Job job = job_of(s, {.layers = 16, .frozen_from = 50, .frozen = 8});
  const auto asked =
      run(job, *job.load, parse_policy("optimal").value(), RunOptions{.shares = true});
  ASSERT_TRUE(asked) << asked.error().message;
  ASSERT_TRUE(asked->others);
  EXPECT_NEAR(asked->others->kept_s, result_of(job, "static:optimal").time.train_s, 1e-9);
  const auto shares = shares_of(*asked);
  ASSERT_TRUE(shares);
  EXPECT_NEAR(shares->cuts, 149.0 / 150, 1e-9) << "in one step of 150 layers moved";
  EXPECT_LT(shares->whole, shares->cuts);
  EXPECT_NEAR(shares->past, 1, 1e-9);
  EXPECT_FALSE(shares_of(result_of(job, "optimal"))) << "nobody asked";
  const auto compared = compare(job, {"optimal"}, {.shares = true});
  ASSERT_TRUE(compared);
  EXPECT_NE(report(s, *compared).find("optimal: of what re-planning can gain its steps took 0.993"),
            std::string::npos);
  EXPECT_EQ(comparison_json(s, *compared)["runs"][2]["shares"]["cuts"], shares->cuts);
  Job with_events = job_of(s);
  with_events.scenario.events.push_back({.step = 5, .leave = {3}});
  const auto refused = compare(with_events, {"optimal"}, {.shares = true});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
}

TEST(Shares, AreOfPlansThatRecomputeTheSameLayers) {
  Scenario s = free_scenario();
  s.training.steps = 200;
  s.policy.noise = 0;
  const JobOptions options{.layers = 16, .frozen_from = 50, .frozen = 8};
  const auto of = [&](const std::string& recompute) {
    s.training.recompute = recompute;
    const Job job = job_of(s, options);
    const auto asked = run(job, *job.load, parse_policy("optimal").value(), {.shares = true});
    EXPECT_TRUE(asked) << asked.error().message;
    const double kept_s = result_of(job, "static:optimal").time.train_s;
    EXPECT_NEAR(asked->others->kept_s, kept_s, 1e-9) << recompute;
    const auto shares = shares_of(*asked);
    EXPECT_TRUE(shares) << recompute;
    // Layers move during a step under the plan before, or before it if the memory asks for that.
    EXPECT_GT(shares->past, 1 - 1e-9) << recompute;
    EXPECT_GT(shares->cuts, 0.98) << recompute;
    EXPECT_LT(shares->cuts, 1 + 1e-9) << recompute;
    return kept_s;
  };
  EXPECT_GT(of("whole"), 1.1 * of("none"));
  s.cluster.memory = Bytes{25'000};  // 26'000 holds a layer more than these
  of("auto");
}

}  // namespace
}  // namespace dynmo::scenario
