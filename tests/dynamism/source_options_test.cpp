// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/source_options.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/core/effects.h"
#include "dynmo/core/files.h"
#include "dynmo/dynamism/combinations.h"
#include "dynmo/dynamism/early_exit/options.h"
#include "dynmo/dynamism/freezing/options.h"
#include "dynmo/dynamism/moe/options.h"
#include "dynmo/dynamism/pruning/options.h"
#include "dynmo/dynamism/registry.h"
#include "dynmo/dynamism/sparse_attention/options.h"
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

// A choice is an enumerator's place in a list of names, so a line that is moved would silently
// choose something else.
template <typename Options, typename Enum>
void expect_names(Enum Options::*field, std::string_view table, std::string_view key,
                  const std::vector<std::pair<std::string_view, Enum>>& values) {
  for (const auto& [name, value] : values) {
    SourceOptions sources;
    const std::string text = fmt::format("[{}]\n{} = '{}'\n", table, key, name);
    const bool known = apply_toml(sources.training_keys(), text, "run").has_value() ||
                       apply_toml(sources.scenario_keys(), text, "scenario").has_value();
    EXPECT_TRUE(known) << text;
    EXPECT_EQ(sources.get<Options>().*field, value) << text;
  }
}

TEST(SourceOptions, ANameIsItsEnumerator) {
  expect_names(&MoeOptions::router, "moe", "router",
               {{"top_k", MoeRouter::kTopK},
                {"bias", MoeRouter::kBias},
                {"sinkhorn", MoeRouter::kSinkhorn},
                {"balanced", MoeRouter::kBalanced},
                {"expert_choice", MoeRouter::kExpertChoice}});
  expect_names(&MoeOptions::drop, "moe", "drop",
               {{"position", MoeDrop::kPosition}, {"probability", MoeDrop::kProbability}});
  expect_names(&EarlyExitOptions::confidence, "early_exit", "confidence",
               {{"gap", ExitConfidence::kGap},
                {"similarity", ExitConfidence::kSimilarity},
                {"classifier", ExitConfidence::kClassifier}});
  expect_names(&EarlyExitOptions::exited, "early_exit", "exited",
               {{"removed", ExitedTokens::kRemoved}, {"propagated", ExitedTokens::kPropagated}});
  expect_names(&FreezingOptions::rule, "freezing", "rule",
               {{"schedule", FreezingRule::kSchedule},
                {"norm", FreezingRule::kNorm},
                {"plasticity", FreezingRule::kPlasticity},
                {"random", FreezingRule::kRandom}});
  expect_names(&PruningOptions::magnitude, "pruning", "magnitude",
               {{"scaled", Magnitude::kScaled}, {"raw", Magnitude::kRaw}});
  expect_names(&SparseAttentionOptions::rule, "sparse_attention", "rule",
               {{"hash", SparseRule::kHash}, {"drop", SparseRule::kDrop}});
}

// A seventh source needs one entry in this half. Keys, checks and load model follow.
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

// Returns the error of a training with these options of one source; "": it is accepted.
template <typename Options>
std::string refusal(const Options& options) {
  SourceOptions sources;
  sources.enable<Options>() = options;
  const auto valid = sources.check_training({.steps = 100000});
  return valid ? std::string() : valid.error().message;
}

TEST(IdleKeys, OfMixturesOfExpertsAreRefusedByName) {
  EXPECT_EQ(
      refusal(MoeOptions{
          .router = MoeRouter::kExpertChoice, .drop = MoeDrop::kProbability, .capacity_factor = 2}),
      "moe.drop is 'probability' with moe.router = expert_choice, which does not use it: "
      "wanted another moe.router, or no moe.drop");
  EXPECT_EQ(refusal(MoeOptions{.router = MoeRouter::kBalanced, .capacity_factor = 1}),
            "moe.capacity_factor is 1.0 with moe.router = balanced, which does not use it: wanted "
            "another moe.router or a number below 1, or no moe.capacity_factor");
  EXPECT_EQ(refusal(MoeOptions{.drop = MoeDrop::kProbability}),
            "moe.drop is 'probability' with moe.capacity_factor = 0, which does not use it: wanted "
            "a moe.capacity_factor above 0, or no moe.drop");
  EXPECT_EQ(refusal(MoeOptions{.router = MoeRouter::kBias, .aux_loss = 0.1}),
            "moe.aux_loss is 0.1 with moe.router = bias, which does not use it: wanted moe.router "
            "= top_k, or no moe.aux_loss");
  EXPECT_EQ(refusal(MoeOptions{.bias_rate = 0.1}),
            "moe.bias_rate is 0.1 with moe.router = top_k, which does not use it: wanted "
            "moe.router = bias, or no moe.bias_rate");
  // These keys have an effect, or have their defaults.
  EXPECT_EQ(refusal(MoeOptions{.router = MoeRouter::kExpertChoice, .capacity_factor = 2}), "");
  EXPECT_EQ(
      refusal(MoeOptions{
          .router = MoeRouter::kBalanced, .drop = MoeDrop::kProbability, .capacity_factor = 0.9}),
      "");
  EXPECT_EQ(refusal(MoeOptions{.router = MoeRouter::kBias, .aux_loss = 0, .bias_rate = 0.1}), "");
  EXPECT_EQ(refusal(MoeOptions{.drop = MoeDrop::kProbability, .capacity_factor = 1}), "");
}

TEST(IdleKeys, OfTheOtherSourcesAreRefusedByName) {
  EXPECT_EQ(refusal(SparseAttentionOptions{.dropped = 0.1}),
            "sparse_attention.dropped is 0.1 with sparse_attention.rule = hash, which does not use "
            "it: wanted sparse_attention.rule = drop, or no sparse_attention.dropped");
  EXPECT_EQ(refusal(SparseAttentionOptions{.rule = SparseRule::kDrop, .buckets = 4}),
            "sparse_attention.buckets is 4 with sparse_attention.rule = drop, which does not use "
            "it: wanted sparse_attention.rule = hash, or no sparse_attention.buckets");
  EXPECT_EQ(refusal(EarlyExitOptions{.survivors = 0.3, .threshold = 0.5}),
            "early_exit.survivors is 0.3 with early_exit.threshold = 0.5, which does not use it: "
            "wanted early_exit.threshold = 0, or no early_exit.survivors");
  EXPECT_EQ(refusal(EarlyExitOptions{.warm_up = 3, .threshold = 1}),
            "early_exit.warm_up is 3 with early_exit.threshold = 1, which does not use it: wanted "
            "an early_exit.threshold below 1, or no early_exit.warm_up");
  EXPECT_EQ(refusal(PruningOptions{.start = 10, .end = 10, .initial_sparsity = 0.5}),
            "pruning.initial_sparsity is 0.5 with pruning.start = pruning.end, which does not use "
            "it: wanted a later pruning.end, or no pruning.initial_sparsity");
  EXPECT_EQ(refusal(FreezingOptions{
                .rule = FreezingRule::kPlasticity, .check_every = 50, .smooth_steps = 50}),
            "freezing.smooth_steps is 50 with freezing.rule = plasticity and freezing.check_every "
            "= 50, which does not use it: wanted more than freezing.check_every, or no "
            "freezing.smooth_steps");
  EXPECT_EQ(refusal(SparseAttentionOptions{.rule = SparseRule::kDrop, .dropped = 0.1}), "");
  EXPECT_EQ(refusal(EarlyExitOptions{.warm_up = 3, .threshold = 0.5}), "");
  EXPECT_EQ(refusal(PruningOptions{.start = 10, .end = 10}), "");
  EXPECT_EQ(refusal(FreezingOptions{
                .rule = FreezingRule::kPlasticity, .check_every = 50, .smooth_steps = 100}),
            "");
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
    if (setting.key == "model.head_slices") given.head_slices = 2;
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

// "0..1", "0..below 1".
std::string short_text(const Range& range) {
  std::string text = text_of(range);
  if (const std::size_t to = text.find(" to "); to != std::string::npos) text.replace(to, 4, "..");
  return text;
}

// The keys of all sources as docs/sources.md shows them.
std::string keys_text(std::vector<SourceEntry> entries) {
  std::string text;
  for (SourceEntry& entry : entries) {
    text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", entry.table);
    for (const SourceKey& key : entry.keys(entry.defaults)) {
      const auto* range = std::get_if<Range>(&key.allowed);
      const auto* choice = std::get_if<TomlChoice>(&key.field);
      std::string conditions;
      for (const ActsIf& condition : key.acts_if) {
        conditions += (conditions.empty() ? ", if " : "; ") + page_text_of(condition);
      }
      text += fmt::format("{:<26} # {} ({}){}{}\n",
                          fmt::format("{} = {}", key.name, toml_value(key.field)), key.help,
                          range != nullptr    ? short_text(*range)
                          : choice != nullptr ? listed(choice->names)
                                              : "text",
                          conditions,
                          key.used_by == UsedBy::kLoad       ? " [scenario]"
                          : key.used_by == UsedBy::kTraining ? " [training]"
                                                             : "");
    }
  }
  return text;
}

// One mechanism for all sources; what a run of so few steps or blocks leaves undone.
TEST(SourceOptions, ASourceWithNothingToDoSaysSoBeforeItStarts) {
  const auto idle = [](std::string_view table, std::int64_t steps, std::int64_t blocks) {
    return SourceOptions().idle_in(table, {.steps = steps, .blocks = blocks});
  };
  EXPECT_EQ(idle("early_exit", 500, 8),
            "early_exit.warm_up is 500: no token would leave in 500 steps, as the run ends before "
            "the warm-up; wanted a shorter warm-up or more steps");
  EXPECT_EQ(idle("early_exit", 501, 8), "");
  EXPECT_NE(idle("early_exit", 501, 4), "");
  EXPECT_EQ(idle("early_exit", 0, 4), "") << "of how many steps is not known";
  EXPECT_EQ(
      idle("pruning", 3000, 8),
      "pruning.start is 3000: no weight would be pruned in 3000 steps, as the run ends before; "
      "wanted an earlier start or more steps");
  EXPECT_EQ(idle("pruning", 3001, 8), "");
  EXPECT_EQ(
      idle("mixture_of_depths", 10, 1),
      "mixture_of_depths.every is 2: no block would choose tokens in 10 steps, as the model has "
      "1 blocks; wanted a smaller number");
  EXPECT_EQ(idle("mixture_of_depths", 10, 2), "");
  EXPECT_EQ(idle("freezing", 1, 8).substr(0, 61),
            "freezing.start is 0.1: no layer would freeze in 1 steps, as t");
  EXPECT_EQ(idle("freezing", 100, 8), "");
  SourceOptions nothing;
  nothing.enable<PruningOptions>() = {.final_sparsity = 0};
  EXPECT_EQ(nothing.idle_in("pruning", {.steps = 10000, .blocks = 8}),
            "pruning.final_sparsity is 0: no weight would be pruned in 10000 steps, as all are to "
            "stay; wanted a larger share");
  nothing.enable<FreezingOptions>() = {.rule = FreezingRule::kNorm, .tolerance = 0};
  EXPECT_EQ(nothing.idle_in("freezing", {.steps = 10000, .blocks = 8}),
            "freezing.tolerance is 0: no layer would freeze in 10000 steps, as every measure is "
            "above it; wanted a larger number");
  nothing.enable<FreezingOptions>() = {.rule = FreezingRule::kPlasticity, .max_fraction = 0.05};
  EXPECT_EQ(nothing.idle_in("freezing", {.steps = 10000, .blocks = 8}),
            "freezing.max_fraction is 0.05: no layer would freeze in 10000 steps, as that is less "
            "than a layer of the model; wanted a larger share");
  EXPECT_EQ(nothing.idle_in("freezing", {.steps = 10000, .blocks = 10}), "");
  EXPECT_EQ(idle("moe", 1, 1), "");
  EXPECT_EQ(idle("sparse_attention", 1, 1), "");
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
