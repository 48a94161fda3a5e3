// SPDX-License-Identifier: Apache-2.0
// A rank that computes slower for a while, which no policy is told.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "dynmo/plan/propose.h"
#include "dynmo/scenario/grid.h"
#include "dynmo/scenario/job.h"
#include "dynmo/scenario/run.h"

namespace dynmo::scenario {
namespace {

constexpr std::int64_t kSlow = 50;
constexpr std::int64_t kFast = 120;
constexpr std::int64_t kSteps = 200;

Job slow_job(double speed, const std::string& source = "") {
  const std::string text = fmt::format(
      "[model]\nblocks = 24\nsequence = 1024\n[cluster]\npipeline_ranks = 8\n{}"
      "[training]\nsteps = {}\nmicro_batches = 16\n"
      "[[event]]\nstep = {}\nslow = [3]\nspeed = {}\n[[event]]\nstep = {}\nslow = [3]\n",
      source, kSteps, kSlow, speed, kFast);
  const auto scenario = parse_scenario(text, "slow.toml");
  EXPECT_TRUE(scenario) << scenario.error().message;
  return make_job(*scenario).value();
}

// The step of the best plan for the speeds that the ranks have.
double best_s(const Job& job, std::int64_t step, double speed) {
  const Grid grid =
      slowed(make_grid(job.scenario.cluster, job.device, 1).value(), {{Rank(3), speed}});
  const cost::ModelCost model = job.load->at(step);
  return plan::propose(plan::Balancer::kOptimal, {{model, grid.kinds[0].cluster, 16}})
      ->evaluation.step_time_s;
}

TEST(SlowRank, IsPlannedForWithinTenStepsByOneMove) {
  for (const double speed : {0.7, 0.5}) {
    SCOPED_TRACE(fmt::format("speed {}", speed));
    const Job job = slow_job(speed);
    const auto run =
        scenario::run(job, *job.load, parse_policy("optimal").value(), {.trace_steps = kSteps});
    ASSERT_TRUE(run) << run.error().message;
    std::map<std::int64_t, double> step_s;
    for (const observe::TracedStep& step : run->trace) {
      step_s[step.step] = to_seconds(step.duration);
    }
    for (std::int64_t step = kSlow + 10; step < kSteps; ++step) {
      if (step >= kFast && step < kFast + 10) continue;
      const double best = best_s(job, step, step < kFast ? speed : 1);
      EXPECT_LE(step_s.at(step), 1.05 * best) << "step " << step;
    }
    std::vector<std::int64_t> moves;
    for (const DecisionAt& at : run->decisions) {
      const control::Decision& decision = at.decision;
      if (!decision.migrate) continue;
      EXPECT_NE(decision.why.find("full speed"), std::string::npos) << decision.why;
      if (at.step >= kFast) continue;
      moves.push_back(at.step);
      const double gain = decision.current_step_s - decision.planned_step_s;
      EXPECT_NEAR(step_s.at(at.step - 1) - step_s.at(at.step + 1), gain, 0.1 * gain);
    }
    EXPECT_EQ(moves, std::vector<std::int64_t>{kSlow + 4});
  }
}

// Exits change the work of the late layers in every step, and are counted.
TEST(SlowRank, IsNamedAmongLayersThatChange) {
  for (const double speed : {0.7, 0.5}) {
    SCOPED_TRACE(fmt::format("speed {}", speed));
    const Job job =
        slow_job(speed, "[dynamism]\nsource = \"early-exit\"\n[early_exit]\nwarm_up = 10\n");
    const auto run =
        scenario::run(job, *job.load, parse_policy("optimal").value(), {.trace_steps = kSteps});
    ASSERT_TRUE(run) << run.error().message;
    std::vector<std::int64_t> named;
    for (const DecisionAt& at : run->decisions) {
      const std::string& why = at.decision.why;
      if (why.find("full speed") == std::string::npos) continue;
      EXPECT_NE(why.find("rank 3"), std::string::npos) << "step " << at.step << ": " << why;
      named.push_back(at.step);
    }
    EXPECT_EQ(named, (std::vector<std::int64_t>{kSlow + 4, kFast + 4}));
  }
}

}  // namespace
}  // namespace dynmo::scenario
