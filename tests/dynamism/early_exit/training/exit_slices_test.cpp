// SPDX-License-Identifier: Apache-2.0
// Exits whose heads lie in slices against exits with whole heads (exit_layer_test.cpp), in fp64.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/early_exit/training/exit_layer.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/head_slice.h"
#include "dynmo/model/recompute.h"
#include "tests/model/helpers.h"

namespace dynmo::model {
namespace {

using dynamism::ExitConfidence;
using dynamism::ExitOptions;
using dynamism::kExitCounts;
using dynamism::kExitFigures;
using dynamism::kExitLeft;
using dynamism::kExitRows;
using dynamism::kExitScored;
using dynamism::kNeverLeaves;

struct SlicesCase {
  ExitConfidence confidence = ExitConfidence::kGap;
  double loss = 0.1;
  float threshold = 0.02F;
  bool counts = true;
  bool recomputes = false;
};
void PrintTo(const SlicesCase& c, std::ostream* out) {
  *out << "confidence " << static_cast<int>(c.confidence) << ", loss " << c.loss << ", threshold "
       << c.threshold << (c.recomputes ? ", recomputed" : "");
}

// Embedding, three blocks with an exit behind the first two, head, and which layer each of them is
// of the model with whole heads.
struct SlicedModel {
  Model layers;
  std::vector<WholePlace> places;
  std::vector<LayerState> states;

  SlicedModel(LlamaConfig config, const SlicesCase& c, std::int64_t slices) {
    config.shape.head_slices = slices;
    Model plain = make_llama(config);
    for (std::size_t i = 0; i < plain.size(); ++i) {
      std::vector<std::shared_ptr<const Layer>> own = {plain[i]};
      if (i == 2 || i == 4) {
        own = dynamism::exit_layers(plain[i], {.hidden = config.shape.hidden,
                                               .vocabulary = config.shape.vocabulary,
                                               .confidence = c.confidence,
                                               .loss = c.loss,
                                               .counts = c.counts,
                                               .slices = slices});
      }
      layers.insert(layers.end(), own.begin(), own.end());
    }
    places = whole_places(layers);
    if (!c.recomputes) return;
    for (auto& layer : layers) layer = recomputed(layer);
  }

  void set_threshold(float threshold) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      if (dynamism::has_threshold(*layers[i])) dynamism::set_threshold(states[i], threshold);
    }
  }

  // The same values as those of a model with whole heads.
  void take(const SlicedModel& whole) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      LayerState state = testing::double_state(*layers[i], LayerId(static_cast<int>(i)), 1);
      const LayerState& from = whole.states[static_cast<std::size_t>(places[i].layer)];
      for (Parameter& p : state.parameters) {
        const auto part = parse_matrix_rows(p.name);
        const auto found =
            std::ranges::find(from.parameters, part ? part->matrix : p.name, &Parameter::name);
        ASSERT_NE(found, from.parameters.end()) << p.name;
        p.value =
            (part ? found->value.narrow(0, part->rows.begin, part->rows.end - part->rows.begin)
                  : found->value)
                .clone();
        p.gradient = at::zeros_like(p.value);
      }
      states.push_back(std::move(state));
    }
  }
};

struct SlicesRun {
  double loss = 0;
  at::Tensor rows;                           // that are left at the end, as flags
  std::map<int, std::vector<double>> exits;  // figures by whole layer
  std::map<std::string, at::Tensor> gradients;
};

SlicesRun run_slices(SlicedModel& model, const LayerContext& context) {
  SlicesRun result;
  std::vector<std::unique_ptr<Stash>> stashes(model.layers.size());
  Hidden hidden;
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    const Layer& layer = *model.layers[i];
    const Output output = layer.forward(model.states[i], hidden, context, &stashes[i]);
    EXPECT_EQ(output.figures.size(), layer.figures().size()) << layer.name();
    if (output.loss.defined()) result.loss += output.loss.item<double>();
    hidden = output.hidden;
    if (i + 1 < model.layers.size() && !layer.floats_passed()) {
      result.rows = at::ones({context.tokens_BT.numel()}, at::kBool);
      if (hidden.rows.defined()) {
        result.rows.zero_().index_fill_(0, hidden.rows.to(at::kLong), true);
      }
    }
    if (dynamism::has_exit(layer)) result.exits[model.places[i].layer] = output.figures;
  }
  at::Tensor gradient;
  for (std::size_t i = model.layers.size(); i-- > 0;) {
    gradient = model.layers[i]->input_gradient(model.states[i], *stashes[i], gradient,
                                               Layer::InputGradient::kWanted);
    model.layers[i]->weight_gradient(model.states[i], *stashes[i]);
  }
  std::map<std::string, std::vector<at::Tensor>> parts;
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    for (const Parameter& p : model.states[i].parameters) {
      const auto part = parse_matrix_rows(p.name);
      parts[fmt::format("{} {}", model.places[i].layer, part ? part->matrix : p.name)].push_back(
          p.gradient);
    }
  }
  for (const auto& [name, rows] : parts) result.gradients[name] = at::cat(rows);
  return result;
}

class ExitSlices : public ::testing::TestWithParam<SlicesCase> {};

TEST_P(ExitSlices, AreTheWholeExitForwardAndBack) {
  const SlicesCase& c = GetParam();
  LlamaConfig config = testing::tiny_config();
  config.shape.blocks = 3;
  config.shape.vocabulary = 7 * 128 + 37;
  SlicedModel whole(config, c, 1);
  for (std::size_t i = 0; i < whole.layers.size(); ++i) {
    whole.states.push_back(
        testing::double_state(*whole.layers[i], LayerId(static_cast<int>(i)), 11 + i));
  }
  whole.set_threshold(c.threshold);
  LayerContext context = testing::random_context(config.shape, 3, 9);
  context.sequences = 3;
  context.sequence_length = config.shape.sequence;
  context.loss_weight = 0.25;
  const SlicesRun expected = run_slices(whole, context);
  for (const std::int64_t slices : {2, 3, 7}) {
    SlicedModel sliced(config, c, slices);
    sliced.take(whole);
    sliced.set_threshold(c.threshold);
    ASSERT_EQ(std::ssize(sliced.layers), 8 + 3 * (slices - 1));
    const SlicesRun found = run_slices(sliced, context);
    EXPECT_NEAR(found.loss, expected.loss, 1e-12) << slices;
    EXPECT_TRUE(at::equal(found.rows, expected.rows)) << slices;
    ASSERT_EQ(found.exits.size(), expected.exits.size());
    for (const auto& [layer, figures] : expected.exits) {
      for (std::size_t k = 0; k < figures.size(); ++k) {
        EXPECT_NEAR(found.exits.at(layer).at(k), figures[k], 1e-9) << layer << ", figure " << k;
      }
    }
    ASSERT_EQ(found.gradients.size(), expected.gradients.size());
    for (const auto& [name, gradient] : expected.gradients) {
      EXPECT_TRUE(at::allclose(found.gradients.at(name), gradient, 1e-10, 1e-13))
          << slices << " slices, layer " << name << ": off by "
          << (found.gradients.at(name) - gradient).abs().max().item<double>();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, ExitSlices,
    ::testing::Values(
        SlicesCase{}, SlicesCase{.loss = 0}, SlicesCase{.threshold = 0},
        SlicesCase{.threshold = 0.2F, .recomputes = true}, SlicesCase{.threshold = kNeverLeaves},
        SlicesCase{.loss = 0, .threshold = kNeverLeaves, .counts = false},
        SlicesCase{.confidence = ExitConfidence::kSimilarity, .threshold = 0.8F},
        SlicesCase{.confidence = ExitConfidence::kSimilarity,
                   .loss = 0,
                   .threshold = 0.8F,
                   .recomputes = true},
        SlicesCase{.confidence = ExitConfidence::kSimilarity, .loss = 0, .threshold = 0},
        SlicesCase{.confidence = ExitConfidence::kSimilarity, .loss = 0, .threshold = kNeverLeaves},
        SlicesCase{.confidence = ExitConfidence::kClassifier, .threshold = 0.5F},
        SlicesCase{.confidence = ExitConfidence::kClassifier, .loss = 0, .threshold = 0.5F}));

// Some rows leave and some stay in the cases above.
TEST(ExitSlice, LetsSomeRowsGo) {
  LlamaConfig config = testing::tiny_config();
  config.shape.blocks = 3;
  config.shape.vocabulary = 3 * 128;
  SlicedModel sliced(config, {}, 3);
  for (std::size_t i = 0; i < sliced.layers.size(); ++i) {
    sliced.states.push_back(
        testing::double_state(*sliced.layers[i], LayerId(static_cast<int>(i)), 11 + i));
  }
  sliced.set_threshold(0.02F);
  LayerContext context = testing::random_context(config.shape, 3, 9);
  context.sequences = 3;
  context.sequence_length = config.shape.sequence;
  const SlicesRun result = run_slices(sliced, context);
  const auto left = result.rows.sum().item<std::int64_t>();
  EXPECT_GT(left, 0);
  EXPECT_LT(left, context.tokens_BT.numel());
}

TEST(ExitSlice, BeginsWithTheRowsOfTheWholeExit) {
  LlamaConfig config = testing::tiny_config();
  config.shape.vocabulary = 5 * 128 + 9;
  const auto inner = make_llama(config)[2];
  ExitOptions options{.hidden = config.shape.hidden,
                      .vocabulary = config.shape.vocabulary,
                      .confidence = ExitConfidence::kClassifier};
  const auto whole = dynamism::exit_layers(inner, options);
  ASSERT_EQ(whole.size(), 1U);
  const LayerState expected = make_state(*whole[0], LayerId(2), 3);
  options.slices = 4;
  const auto slices = dynamism::exit_layers(inner, options);
  ASSERT_EQ(slices.size(), 4U);
  EXPECT_EQ(slices[0]->name(), "blocks.0.mlp");
  EXPECT_EQ(slices[3]->name(), "blocks.0.exit.3 of 4");
  std::map<std::string, std::vector<at::Tensor>> found;
  for (std::size_t i = 0; i < slices.size(); ++i) {
    EXPECT_EQ(dynamism::has_exit(*slices[i]), i == 3);
    EXPECT_TRUE(dynamism::has_threshold(*slices[i]));
    for (const Parameter& p :
         make_state(*slices[i], LayerId(2 + static_cast<int>(i)), 3).parameters) {
      const auto part = parse_matrix_rows(p.name);
      found[part ? part->matrix : p.name].push_back(p.value);
    }
  }
  ASSERT_EQ(found.size(), expected.parameters.size());
  for (const Parameter& p : expected.parameters) {
    EXPECT_TRUE(testing::same_bits(at::cat(found.at(p.name)), p.value)) << p.name;
  }
}

}  // namespace
}  // namespace dynmo::model
