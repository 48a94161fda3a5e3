// SPDX-License-Identifier: Apache-2.0
#include "dynmo/scenario/scenario.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "dynmo/scenario/grid.h"
#include "dynmo/scenario/job.h"
#include "tests/dynamism/seventh_source.h"
#include "tests/support/temp_folder.h"

namespace dynmo::scenario {
namespace {

std::string error_of(const std::string& text) {
  const auto scenario = parse_scenario(text, "s.toml");
  return scenario.has_value() ? "" : scenario.error().message;
}

TEST(ScenarioFile, NamesLineKeyAndNearestKey) {
  EXPECT_EQ(error_of("[model]\nblock = 3\n"),
            "s.toml:2: 'model.block' is not a known key, did you mean 'model.blocks'?");
  EXPECT_EQ(error_of("[cluster]\nmemory = \"80 Gb\"\n").substr(0, 33),
            "s.toml:2: cluster.memory is '80 G");
  EXPECT_EQ(error_of("[[event]]\nstep = 1\nleafs = [1]\n"),
            "s.toml:3: 'event.leafs' is not a known key, did you mean 'event.leave'?");
  EXPECT_EQ(error_of("[dynamism]\nsource = \"frezing\"\n"),
            "s.toml: dynamism.source: 'frezing' is not a source, did you mean 'freezing'?");
}

TEST(ScenarioFile, RefusesWhatNoScenarioCanHave) {
  EXPECT_EQ(error_of("[training]\nsteps = 0\n"),
            "s.toml: training.steps is 0, wanted 1 to 10000000");
  EXPECT_NE(error_of("[cluster]\npipeline_ranks = 4096\ndata_parallel = 1000\n"), "");
  EXPECT_NE(error_of("[policy]\ncompare = [\"fastest\"]\n").find("fastest"), std::string::npos);
  EXPECT_NE(error_of("[policy]\nnoise = nan\n"), "");
  // A rank that is not there cannot leave; somebody must stay; events are in order.
  EXPECT_NE(error_of("[[event]]\nstep = 1\nleave = [2]\n[[event]]\nstep = 2\nleave = [2]\n"), "");
  EXPECT_NE(error_of("[cluster]\npipeline_ranks = 1\n[[event]]\nstep = 1\nleave = [0]\n"), "");
  EXPECT_NE(error_of("[[event]]\nstep = 5\n[[event]]\nstep = 4\n"), "");
  EXPECT_EQ(error_of("[[event]]\nstep = 5\nleave = [1]\n[[event]]\nstep = 7\njoin = [1]\n"), "");
}

TEST(ScenarioFile, SlicesOfTheHeadAreOfAShape) {
  const auto sliced = parse_scenario("[model]\nhead_slices = 16\n", "s.toml");
  ASSERT_TRUE(sliced.has_value()) << sliced.error().message;
  EXPECT_EQ(make_job(*sliced).value().load->at(0).size(), 2 * 24 + 1 + 16);
  EXPECT_EQ(error_of("[model]\nhead_slices = 0\n"),
            "s.toml: model.head_slices is 0, wanted 1 to 16777216");
  EXPECT_NE(error_of("[model]\nhead_slices = 2\nprofile = \"p.json\"\n").find("head_slices is 2"),
            std::string::npos);
  const auto many = parse_scenario("[model]\nhead_slices = 394\n", "s.toml");
  ASSERT_TRUE(many.has_value());
  EXPECT_NE(make_job(*many).error().message.find("head_slices is 394, wanted 1 to 393"),
            std::string::npos);
}

TEST(ScenarioFile, ResolvedFormReadsBackToTheSame) {
  Scenario scenario;
  scenario.cluster.pipeline_ranks = 16;
  scenario.cluster.nic_bandwidth = 0.1 + 0.2;
  scenario.events = {{.step = 3, .leave = {1, 2}, .join = {}, .replicas = 0, .failure = true}};
  const auto back = parse_scenario(to_toml(scenario), "s.toml");
  ASSERT_TRUE(back.has_value()) << back.error().message;
  EXPECT_EQ(to_toml(*back), to_toml(scenario));
  EXPECT_EQ(back->events[0].leave, scenario.events[0].leave);
  EXPECT_TRUE(back->events[0].failure);
}

TEST(ScenarioFile, ASeventhSourceNeedsAnEntryOnly) {
  Scenario scenario;
  scenario.sources = dynamism::seven_sources();
  ASSERT_TRUE(apply_toml(keys_of(scenario),
                         "[dynamism]\nsource = \"layer-drop\"\n[layer_drop]\njitter = 0.5\n",
                         "s.toml"));
  EXPECT_NE(to_toml(scenario).find("[layer_drop]\nrate = 0.2\nevery = 2\njitter = 0.5\n"),
            std::string::npos);
  const auto job = make_job(scenario);
  ASSERT_TRUE(job.has_value()) << job.error().message;
  EXPECT_LT(job->load->at(0).layers[1].forward_s, job->dense->at(0).layers[1].forward_s);
  scenario.sources.get<dynamism::LayerDropOptions>().rate = 7;
  EXPECT_EQ(validate(scenario).error().message, "layer_drop.rate is 7, wanted 0 to 1");
}

TEST(ScenarioFile, PathsAreRelativeToTheFileAndSettingsComeLast) {
  const TempFolder folder;
  ASSERT_TRUE(write_file_durably(folder.path() / "s.toml",
                                 "[model]\nprofile = \"p.json\"\n[training]\nsteps = 5\n"));
  const auto scenario =
      read_scenario(folder.path() / "s.toml", std::vector<std::string>{"training.steps=7"});
  ASSERT_TRUE(scenario.has_value()) << scenario.error().message;
  EXPECT_EQ(scenario->model.profile, (folder.path() / "p.json").string());
  EXPECT_EQ(scenario->training.steps, 7);
  const auto job = make_job(*scenario);
  ASSERT_FALSE(job.has_value());
  EXPECT_NE(job.error().message.find("p.json"), std::string::npos);
}

TEST(ScenarioFile, MutatedTextNeverCrashes) {
  const std::string good = to_toml(Scenario{});
  constexpr std::uint64_t kSeed = 7;
  Rng rng(kSeed);
  for (int i = 0; i < 2000; ++i) {
    std::string text = good;
    for (int changes = 0; changes < 3; ++changes) {
      text[rng.below(text.size())] = static_cast<char>(rng.below(256));
    }
    const auto scenario = parse_scenario(text, "s.toml");
    if (scenario.has_value()) continue;
    EXPECT_EQ(scenario.error().code, ErrorCode::kBadInput) << "seed " << kSeed << ", case " << i;
  }
}

cost::Device plain_device() { return cost::find_device("h100").value(); }

TEST(Grid, EqualReplicasAreOneKind) {
  Scenario::Cluster cluster{.pipeline_ranks = 4, .data_parallel = 6, .ranks_per_node = 8};
  const Grid grid = make_grid(cluster, plain_device(), 6).value();
  ASSERT_EQ(grid.kinds.size(), 1U);
  EXPECT_EQ(grid.kinds[0].count, 6);
  EXPECT_EQ(grid.planned.size(), 4);
}

// 6 replicas of 4 positions; rank 9 is position 1 of replica 2. The plan for all sees it.
TEST(Grid, ASlowRankMakesAKindOfItsOwnAndIsPlannedFor) {
  const Scenario::Cluster cluster{.pipeline_ranks = 4,
                                  .data_parallel = 6,
                                  .ranks_per_node = 8,
                                  .slow_ranks = {9},
                                  .slow_speed = 0.5};
  const Grid grid = make_grid(cluster, plain_device(), 6).value();
  ASSERT_EQ(grid.kinds.size(), 2U);
  EXPECT_EQ(grid.kinds[0].count + grid.kinds[1].count, 6);
  for (int position = 0; position < 4; ++position) {
    EXPECT_EQ(grid.planned.ranks[static_cast<std::size_t>(position)].speed,
              position == 1 ? 0.5 : 1.0);
  }
  // The same rank in the other order: position 1, replica 3.
  Scenario::Cluster by_data = cluster;
  by_data.order = "data";
  EXPECT_EQ(make_grid(by_data, plain_device(), 6)->planned.ranks[1].speed, 0.5);
  // Without that replica nothing is slow.
  EXPECT_EQ(make_grid(cluster, plain_device(), 2)->kinds.size(), 1U);
}

// Pipelines of 3 on nodes of 4: node boundaries lie elsewhere in every replica.
TEST(Grid, ThePlanSeesEveryNodeBoundary) {
  const Scenario::Cluster cluster{.pipeline_ranks = 3, .data_parallel = 4, .ranks_per_node = 4};
  const Grid grid = make_grid(cluster, plain_device(), 4).value();
  EXPECT_EQ(grid.kinds.size(), 3U);  // 012|, 3|45 , 67|8, 9ab
  EXPECT_EQ(grid.planned.ranks[2].node, 2);
}

}  // namespace
}  // namespace dynmo::scenario
