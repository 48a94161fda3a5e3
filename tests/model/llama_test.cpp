// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "dynmo/kernels/operations.h"
#include "dynmo/model/adamw.h"
#include "helpers.h"

namespace dynmo::model {
namespace {

using testing::random_tensor;

TEST(Llama, NamesAndShapesAreThoseOfHuggingFace) {
  const LlamaConfig config = testing::tiny_config();
  const Model model = make_llama(config);
  ASSERT_EQ(model.size(), 6U);
  EXPECT_EQ(model[3]->name(), "blocks.1.attention");
  const auto specs = model[3]->parameters();
  EXPECT_EQ(specs[2].name, "self_attn.k_proj.weight");
  EXPECT_EQ(specs[2].shape, (std::vector<std::int64_t>{12, 24}));
  const auto full = [&](int layer, const char* name) {
    return checkpoint_name(config, decoder_place(LayerId{layer}, 2), name);
  };
  EXPECT_EQ(full(0, "embed_tokens.weight"), "model.embed_tokens.weight");
  EXPECT_EQ(full(3, "self_attn.k_proj.weight"), "model.layers.1.self_attn.k_proj.weight");
  EXPECT_EQ(full(4, "mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight");
  EXPECT_EQ(full(5, "norm.weight"), "model.norm.weight");
  EXPECT_EQ(full(5, "lm_head.weight"), "lm_head.weight");
}

TEST(Llama, AConfigThatCannotWorkIsRefusedByFieldAndWanted) {
  const auto message = [](auto change) {
    LlamaConfig config;
    change(config);
    const auto result = validate(config);
    return result ? std::string() : result.error().message;
  };
  EXPECT_EQ(message([](LlamaConfig&) {}), "");
  EXPECT_EQ(message([](LlamaConfig& c) { c.shape.hidden = 250; }),
            "model.hidden is 250, wanted a multiple of model.heads (8), such as 256");
  EXPECT_EQ(message([](LlamaConfig& c) { c.shape.hidden = 248; }),
            "model.hidden / model.heads is 248 / 8 = 31, wanted an even head size for rotary "
            "positions, such as model.hidden=256");
  EXPECT_EQ(message([](LlamaConfig& c) { c.shape.kv_heads = 3; }),
            "model.kv_heads is 3, wanted a divisor of model.heads (8)");
  EXPECT_EQ(message([](LlamaConfig& c) { c.shape.blocks = 0; }),
            "model.blocks is 0, wanted 1 to 4096");
  EXPECT_EQ(message([](LlamaConfig& c) { c.shape.blocks = 100'000'000; }),
            "model.blocks is 100000000, wanted 1 to 4096");
  EXPECT_EQ(message([](LlamaConfig& c) { c.shape.hidden = 1 << 24; }),
            "model.hidden is 16777216, wanted 1 to 131072");
  EXPECT_EQ(
      message([](LlamaConfig& c) { c.shape.sequence = 1 << 24; }),
      "model.sequence x model.hidden / model.heads is 16777216 x 32, wanted at most 268435456: "
      "a table of that many angles is made");
  EXPECT_EQ(message([](LlamaConfig& c) { c.dropout = 1; }),
            "model.dropout is 1, wanted 0 or more and less than 1");
  EXPECT_EQ(message([](LlamaConfig& c) { c.rms_epsilon = NAN; }),
            "model.norm_epsilon is nan, wanted above 0");
  EXPECT_EQ(message([](LlamaConfig& c) { c.rope.factor = 0; }),
            "model.rope_factor is 0, wanted above 0");
  EXPECT_EQ(message([](LlamaConfig& c) {
              c.rope.scaling = cost::RotaryScaling::kLlama3;
              c.rope.low_freq_factor = 4;
            }),
            "model.rope_high_freq_factor is 4, wanted above model.rope_low_freq_factor (4)");
}

TEST(Llama, InitialLossIsThatOfAUniformGuess) {
  LlamaConfig config;
  config.shape.blocks = 2;
  const Model model = make_llama(config);
  std::vector<LayerState> states = testing::make_states(model, 3);
  const double loss = testing::forward(model, states, testing::random_context(config.shape, 4, 1))
                          .loss.item<double>();
  EXPECT_NEAR(loss, std::log(257.0), 0.1);
}

TEST(Llama, LearnsASmallRepeatedText) {
  LlamaConfig config = testing::tiny_config();
  config.shape.hidden = 32;
  config.shape.vocabulary = 27;
  config.shape.sequence = 16;
  const Model model = make_llama(config);
  std::vector<LayerState> states = testing::make_states(model, 3);
  const std::string text = "the layers move while the model trains ";
  LayerContext context;
  context.tokens_BT = at::empty({4, 16}, at::kLong);
  context.targets_BT = at::empty({4, 16}, at::kLong);
  const auto token = [&](std::int64_t i) -> std::int64_t {
    const char c = text[static_cast<std::size_t>(i) % text.size()];
    return c == ' ' ? 26 : c - 'a';
  };
  for (std::int64_t i = 0; i < 64; ++i) {
    context.tokens_BT.data_ptr<std::int64_t>()[i] = token(i);
    context.targets_BT.data_ptr<std::int64_t>()[i] = token(i + 1);
  }
  std::vector<double> losses;
  for (int step = 0; step < 30; ++step) {
    losses.push_back(testing::backward(model, states, context));
    for (LayerState& state : states) {
      update(state, {.learning_rate = 1e-2});
    }
  }
  EXPECT_GT(losses.front(), 3.0);
  EXPECT_LT(losses.back(), 0.5);
}

TEST(Llama, GroupedQueriesEqualFullAttentionWithRepeatedKeyHeads) {
  const LlamaConfig grouped = testing::tiny_config();
  LlamaConfig full = grouped;
  full.shape.kv_heads = full.shape.heads;
  const auto layer = make_llama(grouped)[1];
  const LayerState state = testing::double_state(*layer, LayerId{1}, 6);
  LayerState repeated = testing::double_state(*make_llama(full)[1], LayerId{1}, 6);
  for (std::size_t i = 0; i < state.parameters.size(); ++i) {
    at::Tensor value = state.parameters[i].value;
    if (i == 2 || i == 3) {
      value = value.view({2, 1, 6, 24}).expand({2, 2, 6, 24}).reshape({24, 24});
    }
    repeated.parameters[i].value = value;
  }
  const at::Tensor x = random_tensor({2, 10, 24}, 8);
  const at::Tensor a = layer->forward(state, x, {}, nullptr).hidden.x;
  const at::Tensor b = make_llama(full)[1]->forward(repeated, x, {}, nullptr).hidden.x;
  EXPECT_TRUE(at::allclose(a, b, 1e-12, 1e-12));
}

TEST(Rotary, ProductsDependOnTheDistanceAlone) {
  const kernels::RotaryTable table = kernels::rotary_table(64, cost::frequencies({}, 8));
  const at::Tensor q = random_tensor({1, 1, 1, 8}, 1).expand({1, 64, 1, 8});
  const at::Tensor k = random_tensor({1, 1, 1, 8}, 2).expand({1, 64, 1, 8});
  const auto turned = [&](const at::Tensor& x) {
    at::Tensor copy = x.contiguous().clone();
    kernels::apply_rope(copy, table, kernels::Rope::kForward);
    return copy;
  };
  const at::Tensor products = turned(q).view({64, 8}).matmul(turned(k).view({64, 8}).t());
  for (std::int64_t distance = -20; distance <= 20; ++distance) {
    const at::Tensor diagonal = products.diagonal(distance);
    EXPECT_LT((diagonal - diagonal[0]).abs().max().item<double>(), 1e-12) << distance;
  }
  EXPECT_GT((products[10][0] - products[0][0]).abs().item<double>(), 1e-3);
  EXPECT_TRUE(at::allclose(turned(q).norm(2, at::IntArrayRef{-1}, false),
                           q.norm(2, at::IntArrayRef{-1}, false)));
  at::Tensor back = turned(q);
  kernels::apply_rope(back, table, kernels::Rope::kBack);
  EXPECT_TRUE(at::allclose(back, q, 1e-14, 1e-14));
}

TEST(Rotary, MoreTokensThanPositionsAreABug) {
  const kernels::RotaryTable table = kernels::rotary_table(4, cost::frequencies({}, 8));
  at::Tensor five = at::zeros({1, 5, 1, 8});
  EXPECT_THROW(kernels::apply_rope(five, table, kernels::Rope::kForward), std::logic_error);
}

}  // namespace
}  // namespace dynmo::model
