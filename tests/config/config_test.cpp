// SPDX-License-Identifier: Apache-2.0
#include "dynmo/config/config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "dynmo/dynamism/freezing/options.h"
#include "dynmo/dynamism/moe/options.h"
#include "tests/dynamism/seventh_source.h"

namespace dynmo::config {
namespace {

class ConfigFile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("dynmo-config-{}", ::getpid());
    ASSERT_TRUE(make_directories(folder_));
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path write(const std::string& text) {
    const auto path = folder_ / "run.toml";
    EXPECT_TRUE(write_file_durably(path, text));
    return path;
  }
  std::string error_of(const std::string& text) {
    Config config;
    const auto result = apply_file(config, write(text));
    return result.has_value()
               ? ""
               : result.error().message.substr(result.error().message.find("run.toml"));
  }

  std::filesystem::path folder_;
};

TEST_F(ConfigFile, ReadsWhatItSaysAndKeepsTheDefaults) {
  Config config;
  ASSERT_TRUE(apply_file(
      config, write("[model]\nhidden = 64\n[pipeline]\ncut = [3, 4]\nschedule = \"gpipe\"\n")));
  EXPECT_EQ(config.model.shape.hidden, 64);
  EXPECT_EQ(config.model.shape.blocks, Config{}.model.shape.blocks);
  EXPECT_EQ(config.pipeline.cut, (std::vector<std::int64_t>{3, 4}));
  EXPECT_EQ(config.pipeline.schedule, "gpipe");
}

TEST_F(ConfigFile, UnknownKeyNamesLineAndNearestKey) {
  EXPECT_EQ(error_of("[model]\nhiden = 64\n"),
            "run.toml:2: 'model.hiden' is not a known key, did you mean 'model.hidden'?");
}

TEST_F(ConfigFile, WrongTypeNamesLineValueAndWhatWasWanted) {
  EXPECT_EQ(error_of("[train]\n\nsteps = \"many\"\n"),
            "run.toml:3: train.steps is 'many', wanted a whole number");
  EXPECT_EQ(error_of("[train]\nsteps = 1.5\n"),
            "run.toml:2: train.steps is 1.5, wanted a whole number");
  EXPECT_EQ(error_of("[optimizer]\nbeta1 = nan\n"),
            "run.toml:2: optimizer.beta1 is nan, wanted a finite number");
  EXPECT_EQ(error_of("[balance]\nenabled = 1\n"),
            "run.toml:2: balance.enabled is 1, wanted true or false");
  EXPECT_EQ(error_of("[model]\nhidden = {a = 1}\n"),
            "run.toml:2: model.hidden is a table, wanted a whole number");
}

TEST_F(ConfigFile, SyntaxErrorNamesTheLine) {
  EXPECT_EQ(error_of("[model]\nhidden = \n").substr(0, 11), "run.toml:2:");
}

TEST_F(ConfigFile, MissingFileIsAnError) {
  Config config;
  const auto result = apply_file(config, folder_ / "none.toml");
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code, ErrorCode::kBadInput);
}

TEST(Config, SettingsTakeTomlOrPlainText) {
  Config config;
  ASSERT_TRUE(apply_settings(
      config,
      std::vector<std::string>{"train.steps=7", "data.path=some/where", "pipeline.pin=false",
                               "run.directory=\"a b\"", "pipeline.cut=[1,2]"}));
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_EQ(config.data.path, "some/where");
  EXPECT_FALSE(config.pipeline.pin);
  EXPECT_EQ(config.run.directory, "a b");
  EXPECT_EQ(config.pipeline.cut, (std::vector<std::int64_t>{1, 2}));
}

TEST(Config, BadSettingsSayWhichOne) {
  const auto error = [](const std::string& setting) {
    Config config;
    const auto result = apply_settings(config, std::vector<std::string>{setting});
    return result.has_value() ? std::string() : result.error().message;
  };
  EXPECT_EQ(error("train.step=7"),
            "setting train.step=7: 'train.step' is not a known key, did you mean 'train.steps'?");
  EXPECT_EQ(error("train.steps"), "setting train.steps: wanted key=value, such as train.steps=100");
  EXPECT_EQ(error("train.steps=x"),
            "setting train.steps=x: train.steps is 'x', wanted a whole number");
}

TEST_F(ConfigFile, ResolvedFormReadsBackToTheSameValue) {
  Config config;
  config.optimizer.epsilon = 1e-12;
  config.optimizer.learning_rate = 0.1 + 0.2;
  config.model.rope.theta = 5e5;
  config.data.path = "a \"quoted\" \\ path\twith tab";
  config.pipeline.cut = {2, 3, 4};
  Config back;
  const auto read = apply_file(back, write(to_toml(config)));
  ASSERT_TRUE(read.has_value()) << read.error().message;
  EXPECT_EQ(to_toml(back), to_toml(config));
  EXPECT_EQ(back.optimizer.learning_rate, config.optimizer.learning_rate);
  EXPECT_EQ(back.data.path, config.data.path);
}

TEST(Config, IdentityFollowsTheNumbersOfARunAndNothingElse) {
  Config a;
  Config b = a;
  b.pipeline.ranks = 3;
  b.balance.enabled = false;
  b.run.directory = "elsewhere";
  EXPECT_EQ(identity(a), identity(b));
  b.run.device = "cuda";
  EXPECT_EQ(identity(a), identity(b)) << "a run moves from one device to another";
  b.run.device = "emulated";
  EXPECT_NE(identity(a), identity(b));
  b = a;
  b.train.seed = 2;
  EXPECT_NE(identity(a), identity(b));
}

// A restart may group the micro-batches of a step otherwise, but not change them.
TEST(Config, ReplicasAndAccumulationMultiplyTheMicroBatchesOfAStep) {
  Config config;
  config.batch.micro_batches = 8;
  Config two = config;
  two.batch.micro_batches = 2;
  two.batch.accumulation = 2;
  EXPECT_NE(identity(config), identity(two));
  two.pipeline.replicas = 2;
  EXPECT_EQ(step_micro_batches(two), 8);
  EXPECT_EQ(identity(config), identity(two));

  EXPECT_EQ(pipeline_ranks(two, 6).value(), 3);
  const auto odd = pipeline_ranks(two, 5);
  ASSERT_FALSE(odd.has_value());
  EXPECT_EQ(odd.error().code, ErrorCode::kBadInput);
  EXPECT_NE(odd.error().message.find("5 ranks"), std::string::npos) << odd.error().message;

  two.pipeline.replicas = 0;
  EXPECT_EQ(validate(two).error().message, "pipeline.replicas is 0, wanted 1 to 4096");
  two.pipeline.replicas = 4096;
  two.batch.accumulation = 1 << 24;
  EXPECT_NE(validate(two).error().message.find("batch.accumulation"), std::string::npos);
}

TEST(Config, ValidateNamesKeyValueAndRange) {
  Config config;
  config.batch.micro_batches = 0;
  EXPECT_EQ(validate(config).error().message,
            "batch.micro_batches is 0, wanted 1 to 65536 (more of a step: batch.accumulation)");
  config = {};
  config.model.shape.sequence = 0;
  EXPECT_EQ(validate(config).error().message, "model.sequence is 0, wanted 1 to 16777216");
  config = {};
  config.run.device = "gpu";
  EXPECT_EQ(validate(config).error().message, "run.device is 'gpu', wanted cpu, cuda or emulated");
  config.run.device = "cuda";
  EXPECT_TRUE(validate(config));
  EXPECT_TRUE(on_device(config));
  config = {};
  config.pipeline.schedule = "1f2b";
  EXPECT_NE(validate(config).error().message.find("1f1b"), std::string::npos);
  config = {};
  config.pipeline.balancer = "optimum";
  EXPECT_EQ(validate(config).error().message,
            "pipeline.balancer: balancer 'optimum' is not known, did you mean 'optimal'?");
  config = {};
  config.balance.balancer = "tyme";
  EXPECT_EQ(validate(config).error().message,
            "balance.balancer: balancer 'tyme' is not known, did you mean 'time'?");
  config = {};
  config.sources.enable<dynamism::FreezingOptions>().schedule.start = 0.9;
  EXPECT_EQ(validate(config).error().message,
            "freezing.start is 0.9, wanted at most freezing.end, which is 0.7");
  config = {};
  config.pipeline.timeout_s = 1e300;
  EXPECT_EQ(validate(config).error().message,
            "pipeline.timeout_s is 1e+300, wanted 0.1 to 1000000 seconds");
  config = {};
  config.elastic.silence_s = 0.4;
  EXPECT_EQ(validate(config).error().message,
            "elastic.silence_s is 0.4, wanted 0.5 to 1000000 seconds");
  config = {};
  config.emulated.memory_scale = 0;
  EXPECT_EQ(validate(config).error().message,
            "emulated.memory_scale is 0, wanted above 0 and at most 1");
  config = {};
  config.emulated.time_scale = 0;
  EXPECT_EQ(validate(config).error().message, "emulated.time_scale is 0, wanted 0.01 to 1000");
}

// A reader of the message need not look the limit up.
TEST(Config, LimitsAreInTheMessages) {
  const auto error = [](const std::string& setting) {
    Config config;
    EXPECT_TRUE(apply_settings(config, std::vector<std::string>{setting}));
    const auto valid = validate(config);
    return valid ? std::string() : valid.error().message;
  };
  EXPECT_EQ(error("train.steps=16777217"), "train.steps is 16777217, wanted 1 to 16777216");
  EXPECT_EQ(error("batch.micro_batch_size=0"), "batch.micro_batch_size is 0, wanted 1 to 16777216");
  EXPECT_EQ(error("model.vocabulary=-1"),
            "model.vocabulary is -1, wanted 0 to 16777216 (0: that of the data)");
  EXPECT_EQ(error("optimizer.beta2=1"), "optimizer.beta2 is 1, wanted 0 to below 1");
  EXPECT_EQ(error("train.on_nan=stopp"),
            "train.on_nan is 'stopp', wanted stop or skip, did you mean 'stop'?");
  EXPECT_EQ(error("freezing.every=0"), "freezing.every is 0, wanted 1 or more");
}

// Keys of a source mean the same in a training and in a scenario; those that describe a simulated
// load are refused by name.
TEST(Config, KeysOfLoadModelsAreRefusedByName) {
  Config config;
  const auto result = apply_settings(config, std::vector<std::string>{"freezing.front_rate=3"});
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().message,
            "setting freezing.front_rate=3: freezing.front_rate describes a simulated load: it "
            "belongs in a scenario, a training measures instead");
}

TEST(Config, ASourceThatIsNotEnabledIsNotPartOfTheIdentity) {
  Config a;
  Config b;
  b.sources.get<dynamism::FreezingOptions>().schedule.every = 7;
  EXPECT_EQ(identity(a), identity(b));
  a.sources.enable<dynamism::FreezingOptions>();
  EXPECT_NE(identity(a), identity(Config{}));
  b.sources.enable<dynamism::FreezingOptions>();
  EXPECT_NE(identity(a), identity(b));
}

TEST(Config, FreezingIsCheckedAgainstTheModelAndTheRules) {
  const auto error = [](const std::vector<std::string>& settings) {
    Config config;
    EXPECT_TRUE(apply_settings(config, settings));
    const auto valid = validate(config);
    return valid ? std::string() : valid.error().message;
  };
  EXPECT_EQ(error({"freezing.enabled=true"}), "");
  EXPECT_NE(error({"freezing.enabled=true", "model.family=gpt2"}).find("tied embeddings"),
            std::string::npos);
  EXPECT_EQ(error({"freezing.enabled=false", "model.family=gpt2"}), "");
  EXPECT_EQ(
      error({"freezing.enabled=true", "freezing.rule=random"}),
      "freezing.rule is random, wanted schedule, norm or plasticity: a training knows no other");
  EXPECT_EQ(error({"freezing.enabled=true", "freezing.end=1.5"}),
            "freezing.end is 1.5, wanted 0 to 1");
  EXPECT_EQ(
      error({"freezing.enabled=true", "freezing.every=300", "train.steps=200"}),
      "freezing.every is 300: no layer would freeze in 200 steps, as the last change would be "
      "before step 0 and freezing.start is 0.1; wanted fewer steps between changes");
}

// Returns the error of such a run; empty: it is accepted.
std::string error_of_rule(const std::string& rule, std::vector<std::string> settings) {
  Config config;
  settings.insert(settings.end(), {"freezing.enabled=true", "freezing.rule=" + rule});
  EXPECT_TRUE(apply_settings(config, settings));
  const auto valid = validate(config);
  return valid ? std::string() : valid.error().message;
}

TEST(Config, FreezingByNormIsCheckedAgainstTheRunAndTheOtherRules) {
  const auto error = [](std::vector<std::string> settings) {
    return error_of_rule("norm", std::move(settings));
  };
  EXPECT_EQ(error({"train.steps=2000"}), "");
  EXPECT_EQ(error({"train.steps=200"}),
            "freezing.check_every is 300: no layer would freeze in 200 steps, as the first check "
            "would be before step 10 and 3 more are needed (freezing.patience); wanted fewer steps "
            "between checks");
  EXPECT_EQ(error({"train.steps=200", "freezing.check_every=10"}), "");
  EXPECT_EQ(error({"train.steps=2000", "freezing.fraction=0.5"}),
            "freezing.fraction is 0.5 with freezing.rule = norm, which does not use it: wanted "
            "freezing.rule = schedule, or no freezing.fraction");
  EXPECT_EQ(error({"train.steps=2000", "freezing.unfreeze_below=1"}),
            "freezing.unfreeze_below is 1, wanted 0 to below 1");
  EXPECT_NE(error({"train.steps=2000", "model.family=gpt2"}).find("tied embeddings"),
            std::string::npos);
  Config config;
  EXPECT_TRUE(apply_settings(
      config, std::vector<std::string>{"freezing.enabled=true", "freezing.tolerance=0.5"}));
  EXPECT_EQ(
      validate(config).error().message,
      "freezing.tolerance is 0.5 with freezing.rule = schedule, which does not use it: wanted "
      "freezing.rule = norm or plasticity, or no freezing.tolerance");
  const auto unknown = apply_settings(config, std::vector<std::string>{"freezing.rule=norms"});
  ASSERT_FALSE(unknown);
  EXPECT_NE(unknown.error().message.find("did you mean 'norm'"), std::string::npos)
      << unknown.error().message;
}

TEST(Config, FreezingByPlasticityIsCheckedAgainstTheRunAndTheDevice) {
  const auto error = [](std::vector<std::string> settings) {
    return error_of_rule("plasticity", std::move(settings));
  };
  EXPECT_EQ(error({"train.steps=2000"}), "");
  EXPECT_EQ(error({"train.steps=200"}),
            "freezing.check_every is 300: no layer would freeze in 200 steps, as the first check "
            "would be before step 10 and 4 more are needed (freezing.patience and the first "
            "slopes); wanted fewer steps between checks");
  // Checks before steps 10, 20, ..., 50; frozen from step 51 on.
  EXPECT_NE(error({"train.steps=51", "freezing.check_every=10", "freezing.bootstrap=0.2"}), "");
  EXPECT_EQ(error({"train.steps=52", "freezing.check_every=10", "freezing.bootstrap=0.2"}), "");
  EXPECT_EQ(error({"train.steps=2000", "freezing.check_every=1"}),
            "freezing.check_every is 1 with freezing.rule = plasticity, which compares layers with "
            "what they were after the step of the check before: wanted 2 or more");
  EXPECT_EQ(error({"train.steps=2000", "freezing.fraction=0.5"}),
            "freezing.fraction is 0.5 with freezing.rule = plasticity, which does not use it: "
            "wanted freezing.rule = schedule, or no freezing.fraction");
  EXPECT_NE(error({"train.steps=2000", "model.family=gpt2"}).find("tied embeddings"),
            std::string::npos);
  dynamism::FreezingOptions options{.rule = dynamism::FreezingRule::kPlasticity};
  EXPECT_EQ(check_training(options, {.device = "emulated"}).error().message,
            "freezing.rule is plasticity with run.device = emulated, whose layers have no outputs: "
            "wanted freezing.rule = schedule");
  EXPECT_TRUE(check_training(options, {.device = "cuda"}));
}

// Keys of a training that say nothing of a simulated load.
TEST(Config, AScenarioRefusesWhatOnlyATrainingCanDo) {
  dynamism::SourceOptions sources;
  const auto result =
      apply_toml(sources.scenario_keys(), "[freezing]\nunfreeze_below = 0.2\n", "s.toml");
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().message,
            "s.toml:2: freezing.unfreeze_below belongs in the config of a training, a scenario has "
            "no use for it");
}

TEST(Config, ASeventhSourceNeedsAnEntryOnly) {
  Config config;
  config.sources = dynamism::seven_sources();
  const std::string before = identity(config);
  ASSERT_TRUE(apply_text(config, "[layer_drop]\nenabled = true\nrate = 0.3\n", "run.toml"));
  EXPECT_NE(to_toml(config).find("[layer_drop]\nenabled = true\nrate = 0.3\nevery = 2\n\n"),
            std::string::npos);
  EXPECT_NE(identity(config), before);
  EXPECT_TRUE(validate(config));
  config.model.tied_embeddings = true;
  EXPECT_EQ(validate(config).error().message, "layer_drop.enabled is true with tied embeddings");
}

TEST(Config, TiesFollowTheFamilyUnlessTheyAreGiven) {
  const auto tied = [](const std::vector<std::string>& settings) {
    Config config;
    EXPECT_TRUE(apply_settings(config, settings));
    EXPECT_TRUE(validate(config));
    const std::string text = to_toml(config);
    return text.find("tied_embeddings = true") != std::string::npos;
  };
  EXPECT_FALSE(tied({}));
  EXPECT_TRUE(tied({"model.family=gpt2"}));
  EXPECT_TRUE(tied({"model.tied_embeddings=true"}));
  EXPECT_FALSE(tied({"model.family=gpt2", "model.tied_embeddings=false"}));
  Config config;
  config.model.family = "gpt-2";
  EXPECT_EQ(validate(config).error().message,
            "model.family: 'gpt-2' is no family of models, did you mean 'gpt2'?");
}

// "[table]" and "key" lines of TOML, without values and comments. Tables of sources give `enabled`
// alone: docs/sources.md lists their other keys (source_options_test).
std::vector<std::string> keys_in(const std::string& toml) {
  std::vector<std::string> keys;
  std::istringstream lines(toml);
  const dynamism::SourceOptions options;
  const auto sources = options.tables();
  bool of_source = false;
  for (std::string line; std::getline(lines, line);) {
    const std::string key = line.substr(0, line.find_first_of(" #"));
    if (key.starts_with('[')) {
      const std::string table = key.substr(1, key.size() - 2);
      of_source = std::find(sources.begin(), sources.end(), table) != sources.end();
    }
    const bool listed_elsewhere = of_source && !key.starts_with('[') && key != "enabled";
    if (!key.empty() && !listed_elsewhere) keys.push_back(key);
  }
  return keys;
}

TEST(Config, ThePageHasAllKeysAndTheirDefaults) {
  const std::string page = read_file(CONFIG_PAGE).value();
  const std::string fence = "```toml\n";
  const std::size_t begin = page.find(fence) + fence.size();
  const std::string toml = page.substr(begin, page.find("```", begin) - begin);
  Config config;
  const auto read = apply_text(config, toml, "docs/config.md");
  ASSERT_TRUE(read.has_value()) << read.error().message;
  EXPECT_EQ(to_toml(config), to_toml(Config{}));
  EXPECT_EQ(keys_in(toml), keys_in(to_toml(Config{})));
}

// The sum is made by hand for a Llama of one block.
TEST(Config, FlopsOfAStepAreThoseOfItsProducts) {
  Config config;
  config.model.shape = {.vocabulary = 10,
                        .hidden = 8,
                        .blocks = 1,
                        .heads = 2,
                        .kv_heads = 1,
                        .intermediate = 16,
                        .sequence = 4};
  config.batch.micro_batches = 3;
  config.batch.micro_batch_size = 2;
  config.pipeline.replicas = 2;
  const double tokens = 4 * 2;
  const double weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 8 * 10;
  const double keys = 2;  // of a token on average, half of 4
  const double forward = 2 * tokens * weights + 2 * 2 * tokens * keys * 8;
  EXPECT_DOUBLE_EQ(step_flops(config, 0), 2 * 3 * 3 * forward);
  config.model.shape.vocabulary = 0;
  EXPECT_DOUBLE_EQ(step_flops(config, 10), 2 * 3 * 3 * forward);
  EXPECT_TRUE(sparse_sources(config).empty());
  config.sources.enable<dynamism::MoeOptions>();
  EXPECT_TRUE(sparse_sources(config).empty());
  config.sources.enable<dynamism::FreezingOptions>();
  EXPECT_EQ(sparse_sources(config), std::vector<std::string_view>{"freezing"});
  config.run.device = "emulated";
  EXPECT_EQ(step_flops(config, 10), 0);
}

// In the first column of its rows, where our words are.
TEST(Config, TheGlossaryNamesKeysThatExist) {
  const std::filesystem::path page =
      std::filesystem::path(CONFIG_PAGE).parent_path() / "glossary.md";
  std::istringstream lines(read_file(page).value());
  const std::vector<std::string> known = key_names();
  int found = 0;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("| ")) continue;
    const std::string word = line.substr(2, line.find(" | ") - 2);
    const std::regex key("`([a-z]+\\.[a-z_]+)`");
    for (std::sregex_iterator it(word.begin(), word.end(), key), end; it != end; ++it) {
      ++found;
      EXPECT_NE(std::find(known.begin(), known.end(), (*it)[1].str()), known.end()) << (*it)[1];
    }
  }
  EXPECT_GE(found, 15);
}

// Whatever bytes are in the file: an error or a config, never a crash.
TEST_F(ConfigFile, MutatedFilesNeverCrash) {
  const std::string good = to_toml(Config{});
  constexpr std::uint64_t kSeed = 3;
  Rng rng(kSeed);
  for (int i = 0; i < 1000; ++i) {
    std::string text = good;
    for (int changes = 0; changes < 3; ++changes) {
      text[rng.below(text.size())] = static_cast<char>(rng.below(256));
    }
    Config config;
    const auto path = folder_ / "mutated.toml";
    std::ofstream(path, std::ios::binary) << text;
    const auto result = apply_file(config, path);
    if (result.has_value()) continue;
    EXPECT_EQ(result.error().code, ErrorCode::kBadInput) << "seed " << kSeed << ", case " << i;
  }
}

}  // namespace
}  // namespace dynmo::config
