// SPDX-License-Identifier: Apache-2.0
// A key of a config that is given has an effect, or one line refuses it by name.
#include "dynmo/core/effects.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/config/config.h"
#include "tests/support/other_values.h"

namespace dynmo::config {
namespace {

using Settings = std::vector<std::string>;

// The error of a run with this file and these settings; "": it is accepted.
std::string error_of_run(const std::string& file, const Settings& settings) {
  Config config;
  EXPECT_TRUE(apply_text(config, file, "run.toml"));
  EXPECT_TRUE(apply_settings(config, settings));
  const auto valid = validate(config);
  return valid ? std::string() : valid.error().message;
}
std::string error_of_settings(const Settings& settings) { return error_of_run("", settings); }

// Each key of the table alone, with whatever values it takes.
TEST(EffectsOfAConfig, EveryKeyAloneChangesTheRunOrIsRefusedByName) {
  const std::string resolved = to_toml(Config{});
  Config all;
  for (const TomlKey& key : keys_of(all)) {
    if (!key.refused.empty()) continue;
    Settings values = other_values(key);
    ASSERT_FALSE(values.empty()) << key.name;
    values.resize(std::min<std::size_t>(values.size(), 2));
    for (const std::string& value : values) {
      Config config;
      ASSERT_TRUE(apply_settings(config, Settings{key.name + "=" + value})) << key.name;
      const auto valid = validate(config);
      if (!valid) {
        // A switch may be refused for a key of its table: `enabled` for its warm-up.
        const std::string table = key.name.substr(0, key.name.find('.') + 1);
        const std::string named = key.name.ends_with(".enabled") ? table : key.name;
        EXPECT_NE(valid.error().message.find(named), std::string::npos)
            << key.name << "=" << value << ": " << valid.error().message;
        EXPECT_EQ(valid.error().message.find('\n'), std::string::npos) << valid.error().message;
        continue;
      }
      EXPECT_NE(to_toml(config), resolved) << key.name << "=" << value << " is lost";
      Config back;
      ASSERT_TRUE(apply_text(back, to_toml(config), "config.toml"));
      EXPECT_TRUE(validate(back)) << key.name << "=" << value;
      EXPECT_EQ(to_toml(back), to_toml(config)) << key.name << "=" << value;
    }
  }
}

// A default run refuses the keys of tables that are switched off. A key that loses its condition is
// seen here.
TEST(EffectsOfAConfig, TheKeysOfWhatIsSwitchedOffAreThoseWithConditions) {
  Config all;
  for (const TomlKey& key : keys_of(all)) {
    if (!key.refused.empty()) continue;
    const std::string table = key.name.substr(0, key.name.find('.'));
    const std::string switches = table + ".enabled";
    const bool off = key.name != switches && table != "balance" &&
                     key.name != "elastic.silence_s" &&
                     std::ranges::count(key_names(), switches) > 0;
    const std::string error = error_of_settings({key.name + "=" + other_values(key).front()});
    EXPECT_EQ(off && error.find(switches + " = false, which does not use it") == std::string::npos,
              false)
        << key.name << ": " << error;
    const std::string at_default = error_of_settings({key.name + "=" + toml_value(key.field)});
    EXPECT_EQ(at_default, "");
  }
}

TEST(EffectsOfAConfig, WhatWasAcceptedWithoutAWordIsRefusedByName) {
  EXPECT_EQ(
      error_of_settings({"moe.experts=4"}),
      "moe.experts is 4 with moe.enabled = false, which does not use it: wanted moe.enabled = "
      "true, or no moe.experts");
  EXPECT_EQ(error_of_settings({"elastic.pack_slack=0.5"}),
            "elastic.pack_slack is 0.5 with elastic.enabled = false, which does not use it: wanted "
            "elastic.enabled = true, or no elastic.pack_slack");
  EXPECT_EQ(error_of_settings({"elastic.enabled=true", "elastic.pack_slack=0.5"}),
            "elastic.pack_slack is 0.5 with elastic.pack = never, which does not use it: wanted "
            "elastic.pack = auto, or no elastic.pack_slack");
  EXPECT_EQ(error_of_settings({"emulated.profile=nofile"}),
            "emulated.profile is 'nofile' with run.device = cpu, which does not use it: wanted "
            "run.device = emulated, or no emulated.profile");
  EXPECT_EQ(error_of_settings({"pipeline.stages_per_rank=4"}),
            "pipeline.stages_per_rank is 4 with pipeline.schedule = 1f1b, which does not use it: "
            "wanted pipeline.schedule = interleaved or auto, or no pipeline.stages_per_rank");
  EXPECT_EQ(
      error_of_settings({"checkpoint.keep=5"}),
      "checkpoint.keep is 5 with checkpoint.every = 0 and elastic.enabled = false, which does "
      "not use it: wanted checkpoint.every of 1 or more or elastic.enabled = true, or no "
      "checkpoint.keep");
  EXPECT_EQ(
      error_of_settings({"elastic.enabled=true", "elastic.release_timeout_s=5"}),
      "elastic.release_timeout_s is 5.0 with elastic.release_command = '', which does not use "
      "it: wanted an elastic.release_command, or no elastic.release_timeout_s");
  EXPECT_NE(
      error_of_settings({"model.family=gpt2", "model.rope_theta=5"}).find("model.rope_theta is 5"),
      std::string::npos);
  EXPECT_EQ(error_of_settings({"elastic.enabled=true", "checkpoint.keep=5", "elastic.pack=auto",
                               "elastic.pack_slack=0.1", "pipeline.schedule=interleaved",
                               "pipeline.stages_per_rank=3"}),
            "");
}

TEST(EffectsOfAConfig, RanksThatAreNotThereAreNoLimit) {
  Config config;
  ASSERT_TRUE(apply_settings(config, Settings{"elastic.enabled=true", "elastic.ranks_min=10"}));
  EXPECT_EQ(check_ranks(config, 2).error().message,
            "elastic.ranks_min is 10, wanted at most the 2 ranks that the run begins with");
  EXPECT_TRUE(check_ranks(config, 10));
  config.elastic.ranks_min = 1;
  config.elastic.pack_ranks = 10;
  EXPECT_EQ(check_ranks(config, 2).error().message,
            "elastic.pack_ranks is 10, wanted at most the 2 ranks that the run begins with");
  EXPECT_TRUE(check_ranks(Config{}, 1));
}

// A file may describe more than a run of it uses: the flag that switches it off says so.
TEST(EffectsOfAConfig, AFlagThatSwitchesATableOffIsEnough) {
  const std::string file =
      "[freezing]\nenabled = true\nfraction = 0.5\n[checkpoint]\nevery = 5\nkeep = 3\n";
  EXPECT_EQ(error_of_run(file, {}), "");
  EXPECT_EQ(error_of_run(file, {"freezing.enabled=false", "checkpoint.every=0"}), "");
  EXPECT_NE(error_of_run(file, {"freezing.enabled=false", "freezing.fraction=0.4"}), "");
  const std::string off = "[freezing]\nfraction = 0.5\n";
  EXPECT_NE(error_of_run(off, {}), "");
  EXPECT_NE(error_of_run(off, {"train.steps=50"}), "");
  EXPECT_EQ(error_of_run(off, {"freezing.enabled=true"}), "");
}

TEST(EffectsOfAConfig, ATechniqueThatHasNothingToDoInTheRunSaysSo) {
  EXPECT_EQ(
      error_of_settings({"early_exit.enabled=true"}),
      "early_exit.warm_up is 500: no token would leave in 200 steps, as the run ends before the "
      "warm-up; wanted a shorter warm-up or more steps");
  EXPECT_EQ(error_of_settings({"early_exit.enabled=true", "early_exit.warm_up=10"}), "");
  EXPECT_NE(error_of_settings(
                {"early_exit.enabled=true", "early_exit.warm_up=10", "early_exit.exit_every=8"})
                .find("early_exit.exit_every is 8: no token would leave in 200 steps"),
            std::string::npos);
  EXPECT_NE(error_of_settings({"freezing.enabled=true", "freezing.start=1", "freezing.end=1"})
                .find("freezing.start is 1: no layer would freeze in 200 steps"),
            std::string::npos);
  EXPECT_NE(error_of_settings({"freezing.enabled=true", "freezing.fraction=0.01"})
                .find("freezing.fraction is 0.01: no layer would freeze in 200 steps"),
            std::string::npos);
  EXPECT_NE(error_of_settings({"mixture_of_depths.enabled=true", "mixture_of_depths.every=9"})
                .find("mixture_of_depths.every is 9: no block would choose tokens in 200 steps"),
            std::string::npos);
  EXPECT_NE(
      error_of_settings({"pruning.enabled=true"}).find("pruning.end is 7000 in a run of 200 steps"),
      std::string::npos);
}

}  // namespace
}  // namespace dynmo::config
