// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <string>

#include "dynmo/model/adamw.h"
#include "dynmo/model/operations.h"
#include "helpers.h"

namespace dynmo::model {
namespace {

using testing::random_tensor;
using testing::same_bits;

TEST(Llama, NamesAndShapesAreThoseOfHuggingFace) {
  const LlamaConfig config = testing::tiny_config();
  const Model model = make_llama(config);
  ASSERT_EQ(model.size(), 6U);
  EXPECT_EQ(model[3]->name(), "blocks.1.attention");
  const auto specs = model[3]->parameters();
  EXPECT_EQ(specs[2].name, "self_attn.k_proj.weight");
  EXPECT_EQ(specs[2].shape, (std::vector<std::int64_t>{12, 24}));
  const auto full = [&](int layer, const char* name) {
    return checkpoint_name(config, LayerId{layer}, name);
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
  EXPECT_EQ(message([](LlamaConfig& c) { c.hidden = 250; }),
            "model.hidden is 250, wanted a multiple of model.heads (8), such as 256");
  EXPECT_EQ(message([](LlamaConfig& c) { c.hidden = 248; }),
            "model.hidden / model.heads is 248 / 8 = 31, wanted an even head size for rotary "
            "positions, such as model.hidden=256");
  EXPECT_EQ(message([](LlamaConfig& c) { c.kv_heads = 3; }),
            "model.kv_heads is 3, wanted a divisor of model.heads (8)");
  EXPECT_EQ(message([](LlamaConfig& c) { c.blocks = 0; }), "model.blocks is 0, wanted 1 to 4096");
  EXPECT_EQ(message([](LlamaConfig& c) { c.blocks = 100'000'000; }),
            "model.blocks is 100000000, wanted 1 to 4096");
  EXPECT_EQ(message([](LlamaConfig& c) { c.hidden = 1 << 24; }),
            "model.hidden is 16777216, wanted 1 to 131072");
  EXPECT_EQ(
      message([](LlamaConfig& c) { c.sequence = 1 << 24; }),
      "model.sequence x model.hidden / model.heads is 16777216 x 32, wanted at most 268435456: "
      "a table of that many angles is made");
  EXPECT_EQ(message([](LlamaConfig& c) { c.dropout = 1; }),
            "model.dropout is 1, wanted 0 or more and less than 1");
  EXPECT_EQ(message([](LlamaConfig& c) { c.rms_epsilon = NAN; }),
            "model.norm_epsilon is nan, wanted above 0");
}

TEST(Llama, InitialLossIsThatOfAUniformGuess) {
  LlamaConfig config;
  config.blocks = 2;
  const Model model = make_llama(config);
  std::vector<LayerState> states = testing::make_states(model, 3);
  const double loss =
      testing::forward(model, states, testing::random_context(config, 4, 1)).loss.item<double>();
  EXPECT_NEAR(loss, std::log(257.0), 0.1);
}

TEST(Llama, LearnsASmallRepeatedText) {
  LlamaConfig config = testing::tiny_config();
  config.hidden = 32;
  config.vocabulary = 27;
  config.sequence = 16;
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

// Accumulated over micro-batches, through all layers, against the slope of the summed loss in fp64.
TEST(Llama, GradientsOfTheWholeModelMatchCentralDifferences) {
  LlamaConfig config = testing::tiny_config();
  config.dropout = 0.1;
  const Model model = make_llama(config);
  std::vector<LayerState> states;
  for (std::size_t i = 0; i < model.size(); ++i) {
    states.push_back(testing::double_state(*model[i], LayerId{static_cast<int>(i)}, 3));
  }
  std::vector<LayerContext> contexts;
  for (int m = 0; m < 3; ++m) {
    contexts.push_back(testing::random_context(config, 2, static_cast<std::uint64_t>(m)));
    contexts.back().micro_batch = MicroBatchId{m};
  }
  for (const LayerContext& context : contexts) testing::backward(model, states, context);
  constexpr double kStep = 1e-6;
  for (std::uint64_t direction = 0; direction < 6; ++direction) {
    double expected = 0;
    const auto move = [&](double distance, bool measure) {
      for (std::size_t i = 0; i < states.size(); ++i) {
        for (std::size_t j = 0; j < states[i].parameters.size(); ++j) {
          Parameter& p = states[i].parameters[j];
          const at::Tensor step = random_tensor(p.value.sizes(), mix_key({direction, i, j, 91}));
          p.value.add_(step, distance);
          if (measure) expected += (p.gradient * step).sum().item<double>();
        }
      }
    };
    const auto loss = [&] {
      double sum = 0;
      for (const LayerContext& context : contexts) {
        sum += testing::forward(model, states, context).loss.item<double>();
      }
      return sum;
    };
    move(kStep, true);
    const double above = loss();
    move(-2 * kStep, false);
    const double below = loss();
    move(kStep, false);
    const double slope = (above - below) / (2 * kStep);
    EXPECT_NEAR(slope, expected, 1e-6 * (1 + std::abs(expected))) << "direction " << direction;
  }
}

TEST(Llama, ATokenChangesNoScoreBeforeIt) {
  const LlamaConfig config = testing::tiny_config();
  const Model model = make_llama(config);
  const std::vector<LayerState> states = testing::make_states(model, 3);
  const auto logits = [&](const LayerContext& context) {
    at::Tensor hidden;
    for (std::size_t i = 0; i + 1 < model.size(); ++i) {
      hidden = model[i]->forward(states[i], hidden, context, nullptr);
    }
    return llama_logits(config, states.back(), hidden);
  };
  const LayerContext context = testing::random_context(config, 1, 4);
  const at::Tensor before = logits(context);
  for (std::int64_t t = 0; t < config.sequence; ++t) {
    LayerContext changed = context;
    changed.tokens_BT = context.tokens_BT.clone();
    auto& token = changed.tokens_BT.data_ptr<std::int64_t>()[t];
    token = (token + 1) % config.vocabulary;
    const at::Tensor difference_T = (logits(changed) - before).abs().amax(-1)[0];
    for (std::int64_t s = 0; s < config.sequence; ++s) {
      const double difference = difference_T[s].item<double>();
      // Products over rows may round differently by position, so not bit-equal in general.
      if (s < t) {
        EXPECT_LT(difference, 1e-6) << "token " << t << " seen at " << s;
      } else if (s == t) {
        EXPECT_GT(difference, 1e-4) << "token " << t;
      }
    }
  }
}

TEST(Llama, LogitsAreThoseOfTheLoss) {
  const LlamaConfig config = testing::tiny_config();
  const Model model = make_llama(config);
  const LayerState head = make_state(*model.back(), LayerId{5}, 3);
  const LayerContext context = testing::random_context(config, 2, 4);
  const at::Tensor hidden = random_tensor({2, 10, 24}, 8, at::kFloat);
  const at::Tensor logits = llama_logits(config, head, hidden);
  const at::Tensor expected =
      at::cross_entropy_loss(logits.view({-1, 19}), context.targets_BT.view(-1));
  const at::Tensor loss = model.back()->forward(head, hidden, context, nullptr);
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-6);
}

TEST(Llama, GroupedQueriesEqualFullAttentionWithRepeatedKeyHeads) {
  const LlamaConfig grouped = testing::tiny_config();
  LlamaConfig full = grouped;
  full.kv_heads = full.heads;
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
  const at::Tensor a = layer->forward(state, x, {}, nullptr);
  const at::Tensor b = make_llama(full)[1]->forward(repeated, x, {}, nullptr);
  EXPECT_TRUE(at::allclose(a, b, 1e-12, 1e-12));
}

TEST(Rotary, ProductsDependOnTheDistanceAlone) {
  const RotaryTable table = rotary_table(64, 8, 10000);
  const at::Tensor q = random_tensor({1, 1, 1, 8}, 1).expand({1, 64, 1, 8});
  const at::Tensor k = random_tensor({1, 1, 1, 8}, 2).expand({1, 64, 1, 8});
  const auto turned = [&](const at::Tensor& x) {
    at::Tensor copy = x.contiguous().clone();
    rotate(copy, table, Turn::kForward);
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
  rotate(back, table, Turn::kBack);
  EXPECT_TRUE(at::allclose(back, q, 1e-14, 1e-14));
}

TEST(Rotary, MoreTokensThanPositionsAreABug) {
  const RotaryTable table = rotary_table(4, 8, 10000);
  at::Tensor five = at::zeros({1, 5, 1, 8});
  EXPECT_THROW(rotate(five, table, Turn::kForward), std::logic_error);
}

}  // namespace
}  // namespace dynmo::model
