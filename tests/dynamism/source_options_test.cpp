// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/source_options.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "dynmo/core/files.h"
#include "dynmo/dynamism/combinations.h"
#include "dynmo/dynamism/freezing/options.h"
#include "dynmo/dynamism/moe/options.h"
#include "dynmo/dynamism/registry.h"
#include "tests/dynamism/seventh_source.h"
#include "tests/dynamism/shapes.h"

namespace dynmo::dynamism {
namespace {

bool has(const std::vector<TomlKey>& keys, const std::string& name) {
  return std::any_of(keys.begin(), keys.end(),
                     [&](const TomlKey& key) { return key.name == name && key.refused.empty(); });
}

TEST(SourceOptions, AreAValue) {
  SourceOptions one;
  SourceOptions two = one;
  two.get<MoeOptions>().drift = 3;
  two.enable<FreezingOptions>().schedule.every = 7;
  EXPECT_EQ(one.get<MoeOptions>().drift, MoeOptions{}.drift);
  EXPECT_FALSE(one.enabled<FreezingOptions>());
  EXPECT_EQ(two.enabled_tables(), (std::vector<std::string_view>{"freezing"}));
}

// One table of keys: what a training and a scenario share has one field and one default.
TEST(SourceOptions, KeysOfTrainingsAndScenariosAreTheSameFields) {
  SourceOptions sources;
  ASSERT_TRUE(apply_toml(sources.training_keys(), "[freezing]\nevery = 5\nend = 0.5\n", "run"));
  ASSERT_TRUE(apply_toml(sources.scenario_keys(), "[freezing]\nevery = 6\n", "scenario"));
  EXPECT_EQ(sources.get<FreezingOptions>().schedule.every, 6);
  EXPECT_EQ(sources.get<FreezingOptions>().schedule.end, 0.5);
  const auto error = apply_toml(sources.scenario_keys(), "[freezing]\nenabled = true\n", "s.toml");
  EXPECT_EQ(error.error().message,
            "s.toml:2: freezing.enabled belongs in the config of a training: a scenario names its "
            "source in dynamism.source");
}

// What a seventh source needs in this half: an entry. Keys, checks and load model follow.
TEST(SourceOptions, ASeventhSourceIsAnEntry) {
  SourceOptions sources = seven_sources();
  EXPECT_TRUE(has(sources.scenario_keys(), "layer_drop.jitter"));
  EXPECT_TRUE(has(sources.training_keys(), "layer_drop.rate"));
  EXPECT_TRUE(has(sources.training_keys(), "layer_drop.enabled"));
  EXPECT_FALSE(has(sources.training_keys(), "layer_drop.jitter"));
  EXPECT_EQ(load_names(sources).back(), "layer-drop");
  sources.get<LayerDropOptions>().rate = 0.5;
  const LoadInputs inputs = inputs_of(gpt(4, 512, 512));
  const auto load = make_load_model("layer-drop", {.inputs = inputs, .sources = sources});
  ASSERT_TRUE(load) << load.error().message;
  EXPECT_EQ((*load)->at(0).layers[1].forward_s, 0.5 * dense(inputs).layers[1].forward_s);

  sources.get<LayerDropOptions>().rate = 2;
  EXPECT_EQ(sources.check_training({}).error().message, "layer_drop.rate is 2, wanted 0 to 1");
  sources.enable<LayerDropOptions>().rate = 0.5;
  EXPECT_TRUE(sources.check_training({}));
  EXPECT_FALSE(sources.check_training({.tied_embeddings = true}));
}

// Every cell of the table: refused with its reason, whatever the order, or accepted.
TEST(Combinations, EveryPairIsAcceptedOrRefusedByName) {
  const std::vector<std::string_view> tables = SourceOptions().tables();
  const auto refused = refused_pairs();
  for (const std::string_view one : tables) {
    for (const std::string_view other : tables) {
      const auto pair = std::find_if(refused.begin(), refused.end(), [&](const RefusedPair& p) {
        return (p.one == one && p.other == other) || (p.one == other && p.other == one);
      });
      const auto result = check_combination(std::vector<std::string_view>{one, other}, {});
      ASSERT_EQ(result.has_value(), pair == refused.end()) << one << ", " << other;
      if (result) continue;
      const std::string& message = result.error().message;
      EXPECT_NE(message.find(fmt::format("{}.enabled", one)), std::string::npos) << message;
      EXPECT_NE(message.find(fmt::format("{}.enabled", other)), std::string::npos) << message;
      EXPECT_NE(message.find(pair->reason), std::string::npos) << message;
    }
  }
}

// Every source with every setting of the table.
TEST(Combinations, EverySettingIsAcceptedOrRefusedByName) {
  const std::vector<std::string_view> tables = SourceOptions().tables();
  for (const RefusedSetting& setting : refused_settings()) {
    TrainingSetting given;
    if (setting.key == "run.device") given.device = setting.value;
    given.tied_embeddings = setting.key == "model.tied_embeddings" && setting.value == "true";
    if (setting.key == "model.family") given.family = setting.value;
    for (const std::string_view table : tables) {
      const auto refused =
          std::ranges::find_if(refused_settings(), [&](const RefusedSetting& other) {
            return other.source == table && other.key == setting.key &&
                   other.value == setting.value;
          });
      const auto result = check_combination(std::vector{table}, given);
      ASSERT_EQ(result.has_value(), refused == refused_settings().end())
          << table << ", " << setting.key << " = " << setting.value;
      if (result) continue;
      for (const std::string_view word : {table, setting.key, setting.value, refused->reason}) {
        EXPECT_NE(result.error().message.find(word), std::string::npos) << result.error().message;
      }
    }
  }
}

TEST(Combinations, NameSourcesThatThereAre) {
  const std::vector<std::string_view> tables = SourceOptions().tables();
  for (const RefusedPair& pair : refused_pairs()) {
    EXPECT_EQ(std::count(tables.begin(), tables.end(), pair.one), 1) << pair.one;
    EXPECT_EQ(std::count(tables.begin(), tables.end(), pair.other), 1) << pair.other;
  }
  for (const RefusedSetting& setting : refused_settings()) {
    EXPECT_EQ(std::count(tables.begin(), tables.end(), setting.source), 1) << setting.source;
  }
}

// The keys of all sources as docs/sources.md shows them.
std::string keys_text(std::vector<SourceEntry> entries) {
  std::string text;
  for (SourceEntry& entry : entries) {
    text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", entry.table);
    for (const SourceKey& key : entry.keys(entry.defaults)) {
      const auto* range = std::get_if<Range>(&key.allowed);
      const auto* choice = std::get_if<TomlChoice>(&key.field);
      text += fmt::format("{:<26} # {} ({}){}\n",
                          fmt::format("{} = {}", key.name, toml_value(key.field)), key.help,
                          range != nullptr    ? text_of(*range)
                          : choice != nullptr ? listed(choice->names)
                                              : "text",
                          key.used_by == UsedBy::kLoad       ? " [scenario]"
                          : key.used_by == UsedBy::kTraining ? " [training]"
                                                             : "");
    }
  }
  return text;
}

TEST(SourceOptions, ThePageHasAllKeysTheirDefaultsAndRanges) {
  const std::string page = read_file(DYNMO_SOURCES_PAGE).value();
  const std::string fence = "```toml\n";
  const std::size_t begin = page.find(fence) + fence.size();
  EXPECT_EQ(page.substr(begin, page.find("```", begin) - begin), keys_text(built_in_sources()));
  EXPECT_NE(keys_text(seven_entries()).find("[layer_drop]\nrate = 0.2"), std::string::npos);
}

}  // namespace
}  // namespace dynmo::dynamism
