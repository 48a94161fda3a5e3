// SPDX-License-Identifier: Apache-2.0
// Text from a model whose tokens leave on the way: each token's scores are those of the head where
// it left, whatever follows it.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/early_exit/training/exit_layer.h"
#include "dynmo/model/moe.h"
#include "dynmo/weights/export.h"
#include "dynmo/weights/generate.h"
#include "dynmo/weights/trained_model.h"
#include "tests/model/helpers.h"

namespace dynmo::weights {
namespace {

constexpr std::int64_t kVocabulary = 61;

enum class Blocks { kLlama, kGpt2, kExperts };

TrainedModel trained_with_exits(Blocks blocks, float threshold) {
  TrainedModel trained;
  if (blocks == Blocks::kGpt2) {
    model::Gpt2Config config = model::testing::tiny_gpt2();
    config.shape.vocabulary = kVocabulary;
    config.shape.blocks = 3;
    config.shape.sequence = config.shape.positions = 32;
    config.tied_embeddings = false;
    trained.config = config;
    trained.layers = model::make_gpt2(config);
  } else {
    model::LlamaConfig config = model::testing::tiny_config();
    config.shape.vocabulary = kVocabulary;
    config.shape.blocks = 3;
    config.shape.sequence = 32;
    trained.config = config;
    trained.layers = model::make_llama(config);
  }
  for (const std::size_t i : {2, 4, 6}) {
    if (blocks != Blocks::kExperts) continue;
    trained.layers[i] = dynamic_cast<const model::TakesExperts&>(*trained.layers[i])
                            .with({.router = {.experts = 4, .capacity_factor = 0.5}});
  }
  for (const std::size_t i : {2, 4}) {
    trained.layers[i] =
        dynamism::exit_layer(trained.layers[i], {.hidden = 24, .vocabulary = kVocabulary});
  }
  for (std::size_t i = 0; i < trained.layers.size(); ++i) {
    trained.states.push_back(
        model::make_state(*trained.layers[i], LayerId(static_cast<int>(i)), 5));
    // Initial weights are so small that every token would say the same.
    for (model::Parameter& parameter : trained.states.back().parameters) {
      if (parameter.value.dim() == 2) parameter.value.mul_(12);
    }
    if (dynamism::has_exit(*trained.layers[i])) {
      dynamism::set_threshold(trained.states.back(), threshold);
    }
  }
  trained.early_exit = true;
  trained.own_layers = "early_exit";
  return trained;
}

struct LastToken {
  std::int64_t likeliest = 0;
  std::size_t left = 0;  // the layer behind which it left; the head's if behind none
};

// Computes the last token by a whole forward pass of the text.
LastToken last_of(const TrainedModel& trained, const std::vector<std::int64_t>& text) {
  const auto length = static_cast<std::int64_t>(text.size());
  model::LayerContext context;
  context.pass = model::Pass::kGeneration;
  context.tokens_BT = at::tensor(text, at::kLong).unsqueeze(0);
  context.sequences = 1;
  context.sequence_length = length;
  model::Hidden hidden;
  for (std::size_t i = 0; i + 1 < trained.layers.size(); ++i) {
    const model::Output output =
        trained.layers[i]->forward(trained.states[i], hidden, context, nullptr);
    hidden = output.hidden;
    if (!output.left_rows.defined()) continue;
    const std::int64_t last = output.left_rows.numel() - 1;
    if (output.left_rows[last].item<std::int64_t>() != length - 1) continue;
    return {output.left_scores[last].argmax().item<std::int64_t>(), i};
  }
  const at::Tensor x = hidden.x.reshape({1, -1, 24});
  const at::Tensor scores =
      model::logits(trained.config, trained.states.back(), x.narrow(1, x.size(1) - 1, 1));
  return {scores.flatten().argmax().item<std::int64_t>(), trained.layers.size() - 1};
}

TEST(ExitGeneration, IsGreedyByAWholeForwardOnAHundredPrompts) {
  at::set_num_threads(1);
  for (const Blocks blocks : {Blocks::kLlama, Blocks::kGpt2, Blocks::kExperts}) {
    const auto kind = static_cast<int>(blocks);
    const TrainedModel trained = trained_with_exits(blocks, 0.3F);
    std::vector<int> left(trained.layers.size(), 0);
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
      Rng rng(mix_key({0x47454e, seed}));
      std::vector<std::int64_t> text;
      const auto length = 1 + rng.below(12);
      for (std::uint64_t i = 0; i < length; ++i) {
        text.push_back(static_cast<std::int64_t>(rng.below(kVocabulary)));
      }
      const auto made = generate(trained, text, {.tokens = 6});
      ASSERT_TRUE(made) << made.error().message;
      for (const std::int64_t token : *made) {
        const LastToken last = last_of(trained, text);
        ++left[last.left];
        ASSERT_EQ(token, last.likeliest) << "seed " << seed << ", blocks " << kind;
        text.push_back(token);
      }
    }
    for (const std::size_t layer : {2, 4, 7}) {
      EXPECT_GT(left[layer], 2) << "layer " << layer << ", blocks " << kind;
    }
  }
}

// Scores of a text's beginning are those of the text.
TEST(ExitGeneration, ScoresOfATokenDoNotDependOnWhatFollows) {
  at::set_num_threads(1);
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const TrainedModel trained =
        trained_with_exits(seed % 2 == 0 ? Blocks::kLlama : Blocks::kExperts, 0.3F);
    std::vector<std::int64_t> text;
    Rng rng(mix_key({0x505245, seed}));
    for (int i = 0; i < 24; ++i) text.push_back(static_cast<std::int64_t>(rng.below(kVocabulary)));
    const at::Tensor whole = logits(trained, text).value();
    ASSERT_EQ(whole.sizes(), (std::vector<std::int64_t>{24, kVocabulary}));
    for (const std::size_t cut : {1U, 7U, 16U, 23U}) {
      const std::vector<std::int64_t> begin(text.begin(), text.begin() + static_cast<int>(cut));
      EXPECT_TRUE(at::allclose(logits(trained, begin).value(),
                               whole.narrow(0, 0, static_cast<std::int64_t>(cut)), 1e-3, 1e-4))
          << "seed " << seed << ", " << cut;
    }
  }
}

TEST(ExitGeneration, IsNotExported) {
  const auto refused = export_hugging_face(trained_with_exits(Blocks::kLlama, 0.3F), "nowhere");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
  EXPECT_NE(refused.error().message.find("early_exit.enabled"), std::string::npos);
}

}  // namespace
}  // namespace dynmo::weights
