// SPDX-License-Identifier: Apache-2.0
// Every scenario in examples/ answers, at a few steps: none rots.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "dynmo/scenario/report.h"
#include "dynmo/scenario/run.h"

namespace dynmo::scenario {
namespace {

class ScenarioExamples : public testing::TestWithParam<const char*> {};

TEST_P(ScenarioExamples, EveryFileAnswers) {
  const auto examples = std::filesystem::path(DYNMO_EXAMPLES) / GetParam();
  constexpr std::int64_t kSteps = 20;
  std::set<std::string> sources;
  for (const auto& entry : std::filesystem::directory_iterator(examples)) {
    if (entry.path().extension() != ".toml") continue;
    auto scenario = read_scenario(entry.path());
    ASSERT_TRUE(scenario.has_value()) << scenario.error().message;
    sources.insert(scenario->dynamism.source);
    for (Event& event : scenario->events) {
      event.step = event.step * kSteps / scenario->training.steps;
    }
    scenario->training.steps = kSteps;
    scenario->training.sample_every = 5;
    const bool searches = std::ranges::count(scenario->policy.compare, "search") > 0;
    if (searches) scenario->policy.evaluations = 100;  // enough to answer
    const auto job = make_job(*scenario);
    ASSERT_TRUE(job.has_value()) << entry.path() << ": " << job.error().message;
    const auto comparison = compare(*job, scenario->policy.compare);
    ASSERT_TRUE(comparison.has_value()) << entry.path() << ": " << comparison.error().message;
    const double micro_batches =
        static_cast<double>(kSteps) * static_cast<double>(scenario->training.micro_batches);
    for (const RunResult& run : comparison->runs) {
      const std::string what = entry.path().string() + " " + run.name;
      EXPECT_EQ(run.steps_over_memory, 0) << what;
      EXPECT_GE(run.step_time_s, run.ideal_step_time_s) << what;
      EXPECT_NEAR(run.tokens, run.micro_batches * static_cast<double>(job->tokens_per_micro_batch),
                  1e-6)
          << what;
      if (!scenario->events.empty()) continue;  // they change the replicas, or lose steps
      EXPECT_NEAR(run.micro_batches, micro_batches * scenario->cluster.data_parallel, 1e-6) << what;
      // Measuring and moves lengthen the time around the steps, not the steps.
      EXPECT_NEAR(run.time.train_s, run.step_time_s * static_cast<double>(kSteps),
                  1e-9 * run.time.train_s)
          << what;
      if (run.name == "optimal" || run.name == "search") {
        EXPECT_LE(run.step_time_s, comparison->uniform.step_time_s) << what;
      }
    }
  }
  EXPECT_EQ(sources.size(), 6U) << "all six sources";
}

INSTANTIATE_TEST_SUITE_P(Folders, ScenarioExamples, testing::Values("scenarios", "headline"));

}  // namespace
}  // namespace dynmo::scenario
