// SPDX-License-Identifier: Apache-2.0
// Every scenario in examples/ answers, at a few steps: none rots.
#include <gtest/gtest.h>

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
    scenario->policy.evaluations = 100;  // enough to answer
    const auto job = make_job(*scenario);
    ASSERT_TRUE(job.has_value()) << entry.path() << ": " << job.error().message;
    const auto comparison = compare(*job, scenario->policy.compare);
    ASSERT_TRUE(comparison.has_value()) << entry.path() << ": " << comparison.error().message;
    for (const RunResult& run : comparison->runs) {
      EXPECT_GT(run.tokens_per_s(), 0) << entry.path() << " " << run.name;
      EXPECT_EQ(run.steps_over_memory, 0) << entry.path() << " " << run.name;
    }
  }
  EXPECT_EQ(sources.size(), 6U) << "all six sources";
}

INSTANTIATE_TEST_SUITE_P(Folders, ScenarioExamples, testing::Values("scenarios", "headline"));

}  // namespace
}  // namespace dynmo::scenario
