// SPDX-License-Identifier: Apache-2.0
// Which sources of dynamism go together, and with which settings of a run: every cell of the table
// is either run, on one rank and on two, or refused by name before a rank starts.
#include "dynmo/dynamism/combinations.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "blinking_source.h"
#include "dynmo/dynamism/source_options.h"
#include "dynmo/dynamism/training/source.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/emulated/layer.h"
#include "pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

using dynamism::SourceOptions;

constexpr int kCellSteps = 10;

// How a source that trains changes a model within these steps.
const std::map<std::string_view, const char*> kWithinTenSteps = {
    {"moe", "experts = 4\ncapacity_factor = 1.0"},
    {"freezing", "start = 0.2\nend = 0.6\nfraction = 0.5"},
    {"pruning", "start = 1\nend = 7\nevery = 3\nsparse_above = 0.6"},
    {"sparse_attention", "buckets = 4"},
    {"mixture_of_depths", "capacity = 0.25"},
    {"early_exit", "survivors = 0.3\nexit_every = 1\nwarm_up = 1\nramp_steps = 2"}};

struct RunSetting {
  std::string_view key;
  std::string_view value;
};
constexpr std::array kSettings = {
    RunSetting{"model.family", "gpt2"},      RunSetting{"model.tied_embeddings", "true"},
    RunSetting{"model.precision", "bf16"},   RunSetting{"pipeline.replicas", "2"},
    RunSetting{"batch.accumulation", "2"},   RunSetting{"pipeline.recompute", "whole"},
    RunSetting{"pipeline.schedule", "zb-v"}, RunSetting{"run.device", "cuda"},
    RunSetting{"run.device", "emulated"},    RunSetting{"model.head_slices", "2 or more"}};

// One source or two; with one a setting or none.
struct CombinationCell {
  std::vector<std::string_view> tables;
  RunSetting setting = {};
};

std::vector<CombinationCell> cells() {
  SourceOptions sources;
  const std::vector<std::string_view> tables = sources.tables();
  std::vector<CombinationCell> all;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    all.push_back({.tables = {tables[i]}});
    for (std::size_t j = i + 1; j < tables.size(); ++j) {
      all.push_back({.tables = {tables[i], tables[j]}});
    }
    for (const RunSetting& setting : kSettings) {
      all.push_back({.tables = {tables[i]}, .setting = setting});
    }
  }
  return all;
}

// The reason of the table's, with the words that a message has to have; empty: it works.
std::vector<std::string> refusal_of(const CombinationCell& cell) {
  for (const dynamism::RefusedPair& pair : dynamism::refused_pairs()) {
    if (std::ranges::count(cell.tables, pair.one) + std::ranges::count(cell.tables, pair.other) >
        1) {
      return {fmt::format("{}.enabled", pair.one), fmt::format("{}.enabled", pair.other),
              std::string(pair.reason)};
    }
  }
  for (const dynamism::RefusedSetting& refused : dynamism::refused_settings()) {
    if (std::ranges::count(cell.tables, refused.source) > 0 && refused.key == cell.setting.key &&
        refused.value == cell.setting.value) {
      return {fmt::format("{}.enabled", refused.source),
              fmt::format("{} = {}", refused.key, refused.value), std::string(refused.reason)};
    }
  }
  return {};
}

dynamism::TrainingSetting training_of(const RunSetting& setting) {
  dynamism::TrainingSetting training{.steps = kCellSteps};
  training.tied_embeddings = setting.key == "model.tied_embeddings";
  if (setting.key == "run.device") training.device = setting.value;
  if (setting.key == "model.family") training.family = setting.value;
  if (setting.key == "model.head_slices") training.head_slices = 2;
  return training;
}

bool trains(std::string_view table) {
  SourceOptions sources;
  return std::ranges::any_of(sources.training_keys(), [&](const TomlKey& key) {
    return key.name == fmt::format("{}.enabled", table);
  });
}

// kBadInput: a training does not know one of them.
Expected<SourceOptions> enabled(const std::vector<std::string_view>& tables) {
  SourceOptions sources;
  for (const std::string_view table : tables) {
    const auto within = kWithinTenSteps.find(table);
    DYNMO_TRY(apply_toml(sources.training_keys(),
                         fmt::format("[{}]\nenabled = true\n{}\n", table,
                                     within == kWithinTenSteps.end() ? "" : within->second),
                         "cell"));
  }
  return sources;
}

model::Model emulated_layers() {
  cost::LayerCost layer;
  layer.forward_s = layer.backward_input_s = layer.backward_weight_s = 1e-5;
  layer.parameter_bytes = Bytes{256};
  layer.boundary_bytes = Bytes{2 * 12 * 32 * 4};  // of small_model()
  const cost::ModelCost costs{std::vector<cost::LayerCost>(kLayers, layer)};
  return model::make_emulated({.memory_scale = 1, .costs = [costs](std::int64_t) { return costs; }})
      .value();
}

model::DecoderConfig decoder_of(const RunSetting& setting) {
  model::LlamaConfig llama = small_model();
  if (setting.key == "model.tied_embeddings") llama.tied_embeddings = true;
  if (setting.key == "model.head_slices") {
    llama.shape.vocabulary = 300;
    llama.shape.head_slices = 2;
  }
  if (setting.key != "model.family") return llama;
  model::Gpt2Config gpt2;
  gpt2.shape = llama.shape;
  gpt2.shape.kv_heads = 0;
  gpt2.shape.positions = gpt2.shape.sequence;
  gpt2.tied_embeddings = false;
  return gpt2;
}

RunOptions run_of(const RunSetting& setting, const dynamism::MakeSources& make_sources) {
  RunOptions run{.steps = kCellSteps, .make_sources = make_sources};
  const model::DecoderConfig decoder = decoder_of(setting);
  run.layers = model::make_decoder(decoder);
  run.ties = model::ties(decoder);
  if (make_sources) run.layers = shaped(std::move(run.layers), make_sources);
  if (setting.key == "model.precision") run.precision = cost::Precision::kBf16;
  if (setting.key == "pipeline.replicas") run.replicas = 2;
  if (setting.key == "batch.accumulation") run.accumulation = 2;
  if (setting.key == "pipeline.recompute") run.recompute = plan::Recompute::kWhole;
  if (setting.key == "run.device") run.layers = emulated_layers();
  run.cut = {static_cast<int>(run.layers.size())};
  for (model::Tie& tie : run.ties) tie.second = LayerId(run.cut[0] - 1);
  return run;
}

void expect_to_train(const CombinationCell& cell, const SourceOptions& sources) {
  if (cell.setting.value == "cuda") GTEST_SKIP() << "needs a device: tests/gpu";
  RunOptions run = run_of(cell.setting, dynamism::make_sources(sources));
  const RunResult one = run_pipeline(run);
  const int layers = run.cut[0];
  run.cut = {3, layers - 3};
  if (cell.setting.key == "pipeline.schedule") {
    run.plan = plan::make_plan({2, 2, 2, layers - 6}, schedule::wave_placement(2, 2), 2,
                               schedule::ScheduleKind::kZbV);
  }
  expect_same(one, run_pipeline(run), "one rank and two");
  // Every one of them is at work.
  for (const std::string_view table : cell.tables) {
    std::vector<std::string_view> others = cell.tables;
    std::erase(others, table);
    const RunResult without =
        run_pipeline(run_of(cell.setting, dynamism::make_sources(enabled(others).value())));
    ASSERT_TRUE(without.status) << without.status.error().message;
    EXPECT_TRUE(without.losses != one.losses || without.states != one.states) << table;
  }
}

class Combination : public ::testing::TestWithParam<CombinationCell> {};

TEST_P(Combination, IsRunOrRefusedByName) {
  const CombinationCell& cell = GetParam();
  const std::vector<std::string> words = refusal_of(cell);
  const auto checked = dynamism::check_combination(cell.tables, training_of(cell.setting));
  ASSERT_EQ(checked.has_value(), words.empty()) << (checked ? "" : checked.error().message);
  for (const std::string& word : words) {
    EXPECT_NE(checked.error().message.find(word), std::string::npos) << checked.error().message;
  }
  const auto sources = enabled(cell.tables);
  if (const auto load = std::ranges::find_if_not(cell.tables, trains); load != cell.tables.end()) {
    ASSERT_FALSE(sources);
    EXPECT_NE(sources.error().message.find(fmt::format("'{}.enabled' is not a known key", *load)),
              std::string::npos)
        << sources.error().message;
    return;
  }
  ASSERT_TRUE(sources) << sources.error().message;
  for (const std::string_view table : cell.tables) {
    ASSERT_TRUE(kWithinTenSteps.contains(table)) << "how " << table << " changes a model";
  }
  const auto valid = sources->check_training(training_of(cell.setting));
  ASSERT_EQ(valid.has_value(), words.empty()) << (valid ? "" : valid.error().message);
  if (words.empty()) {
    expect_to_train(cell, *sources);
  } else {
    EXPECT_EQ(valid.error().message, checked.error().message);
  }
}

std::string name_of_cell(const CombinationCell& cell) {
  std::string text = fmt::format("{}", fmt::join(cell.tables, "_and_"));
  if (!cell.setting.key.empty()) {
    text += fmt::format("_with_{}_{}", cell.setting.key, cell.setting.value);
  }
  std::ranges::replace_if(
      text, [](char c) { return c == '.' || c == '-' || c == ' '; }, '_');
  return text;
}

INSTANTIATE_TEST_SUITE_P(Cells, Combination, ::testing::ValuesIn(cells()),
                         [](const auto& test) { return name_of_cell(test.param); });

}  // namespace
}  // namespace dynmo::runtime::testing
