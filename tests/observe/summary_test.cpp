// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/summary.h"

#include <gtest/gtest.h>

#include <cmath>

#include "dynmo/core/rng.h"
#include "tests/support/samples.h"

namespace dynmo::observe {
namespace {

RunSummary run(const std::string& name, double step_time_s) {
  RunSummary summary;
  summary.name = name;
  summary.tokens_per_s = 1.0 / step_time_s;
  summary.end_tokens_per_s = 2.0 / step_time_s;
  summary.step_time_s = step_time_s;
  summary.loss_first = 5.1;
  summary.loss_last = 3.3333333333333335;
  summary.loss_digest = "00ff";
  summary.bubble = 0.3;
  summary.imbalance = 0.1;
  summary.ranks = 4;
  summary.steps = 20;
  summary.seconds = 4.25;
  summary.validation_step = 10;
  summary.validation_loss = 3.5;
  summary.generation_loss = 3.625;
  summary.clock_error_s = 0.0125;
  summary.migrations = 2;
  summary.moved_layers = 7;
  summary.moved_bytes = Bytes{1 << 20};
  summary.profile_s = 0.001;
  summary.plan_s = 0.002;
  summary.migrate_s = 0.003;
  summary.replicas = 2;
  summary.reduction_s = 0.25;
  summary.predicted_steps = 19;
  summary.prediction_error_median = 0.04;
  summary.prediction_error_worst = 0.3;
  summary.checkpoints_written = 3;
  summary.checkpoints_failed = 1;
  summary.checkpoint_s = 0.5;
  summary.sources = {{"sparse_attention", {{"pairs", {12, 34}}, {"share", 0.25}}}};
  summary.traffic = {{WorldRank(0), WorldRank(1), Purpose::kActivation, {160, Bytes{163840}}},
                     {WorldRank(1), WorldRank(0), Purpose::kControl, {20, Bytes{20}}}};
  return summary;
}

Summary example() {
  Summary summary;
  summary.device = "emulated";
  summary.runs = {run("static", 0.3), run("dynmo", 0.2)};
  summary.speedup = 1.5;
  summary.best_speedup = 1.6;
  summary.best_is_bound = true;
  summary.best_costs = CostsAre::kGiven;
  summary.cuts_speedup = 1.55;
  summary.overhead = {.profile = 0.01, .plan = 0.001, .migrate = 0.02};
  summary.layers_moved = 12;
  summary.predicted_step_time_s = 0.19;
  summary.measured_step_time_s = 0.2;
  return summary;
}

TEST(Summary, ReadsBackExactly) {
  const auto json = parse_json(summary_json(example()).dump(2), "s.json");
  const auto read = parse_summary(*json, "s.json");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, example());
}

TEST(Summary, OfBeforeThereWasMoreToSayIsStillRead) {
  Json json = summary_json(example());
  Summary expected = example();
  for (std::size_t i = 0; i < 2; ++i) {
    Json run;
    for (const char* key : {"name", "tokens_per_s", "step_time_s", "loss_first", "loss_last",
                            "loss_digest", "bubble", "imbalance", "ranks"}) {
      run[key] = json["runs"][i][key];
    }
    json["runs"][i] = run;
    RunSummary& left = expected.runs[i];
    RunSummary bare;
    bare.name = left.name;
    bare.tokens_per_s = left.tokens_per_s;
    bare.step_time_s = left.step_time_s;
    bare.loss_first = left.loss_first;
    bare.loss_last = left.loss_last;
    bare.loss_digest = left.loss_digest;
    bare.bubble = left.bubble;
    bare.imbalance = left.imbalance;
    bare.ranks = left.ranks;
    left = bare;
  }
  const auto read = parse_summary(json, "s.json");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, expected);
}

TEST(Summary, ALossThatDivergedReadsBackAsNaN) {
  Summary summary = example();
  summary.runs[1].loss_last = std::nan("");
  const auto json = parse_json(summary_json(summary).dump(), "s.json");
  const auto read = parse_summary(*json, "s.json");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_TRUE(std::isnan(read->runs[1].loss_last));
}

TEST(Summary, FaultsNameTheirPlace) {
  const auto error = [](const Json& json) {
    const auto read = parse_summary(json, "s.json");
    return read ? "none" : read.error().message;
  };
  Json json = summary_json(example());
  json["runs"][1].erase("bubble");
  EXPECT_EQ(error(json), "s.json: /runs/1/bubble is missing");
  json = summary_json(example());
  json["overhead"]["plna"] = 1;
  EXPECT_EQ(error(json), "s.json: /overhead/plna is not a known key, did you mean 'plan'?");
  json = summary_json(example());
  json["runs"][0]["traffic"][1]["to"] = -1;
  EXPECT_EQ(error(json), "s.json: /runs/0/traffic/1/to is -1, wanted a rank below 2147483647");
  json = summary_json(example());
  json.erase("overhead");
  EXPECT_EQ(error(json), "s.json: /overhead is missing");
  EXPECT_EQ(error(Json::array()), "s.json: / is array, wanted an object");
}

TEST(Summary, DamagedFilesAreReadOrRefused) {
  int read = 0;
  for (std::uint64_t seed = 0; seed < samples(2000U); ++seed) {
    Rng rng(mix_key({0x50333, seed}));
    std::string text = summary_json(example()).dump();
    constexpr std::string_view kLikely = "0123456789-,:{}[]\"en";
    for (auto edits = 1 + rng.below(3); edits > 0; --edits) {
      text[rng.below(text.size())] = kLikely[rng.below(kLikely.size())];
    }
    const auto json = parse_json(text, "damaged");
    if (!json) continue;
    const auto summary = parse_summary(*json, "damaged");
    if (!summary) {
      ASSERT_EQ(summary.error().code, ErrorCode::kBadInput) << "seed " << seed;
    }
    read += summary ? 1 : 0;
  }
  EXPECT_GT(read, samples(50));
}

}  // namespace
}  // namespace dynmo::observe
