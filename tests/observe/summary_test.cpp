// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/summary.h"

#include <gtest/gtest.h>

#include <cmath>

#include "dynmo/core/rng.h"

namespace dynmo::observe {
namespace {

RunSummary run(const std::string& name, double step_time_s) {
  RunSummary summary;
  summary.name = name;
  summary.tokens_per_s = 1.0 / step_time_s;
  summary.step_time_s = step_time_s;
  summary.loss_first = 5.1;
  summary.loss_last = 3.3333333333333335;
  summary.loss_digest = "00ff";
  summary.bubble = 0.3;
  summary.imbalance = 0.1;
  summary.ranks = 4;
  return summary;
}

Summary example() {
  Summary summary;
  summary.runs = {run("static", 0.3), run("dynmo", 0.2)};
  summary.speedup = 1.5;
  summary.best_speedup = 1.6;
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
  json.erase("overhead");
  EXPECT_EQ(error(json), "s.json: /overhead is missing");
  EXPECT_EQ(error(Json::array()), "s.json: / is array, wanted an object");
}

TEST(Summary, DamagedFilesAreReadOrRefused) {
  int read = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
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
  EXPECT_GT(read, 50);
}

}  // namespace
}  // namespace dynmo::observe
