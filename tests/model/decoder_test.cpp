// SPDX-License-Identifier: Apache-2.0
// What holds for a decoder of any family.
#include "dynmo/model/decoder.h"

#include <gtest/gtest.h>

#include <cmath>

#include "dynmo/core/rng.h"
#include "dynmo/model/precision.h"
#include "helpers.h"
#include "stash_bytes.h"

namespace dynmo::model {
namespace {

using testing::random_tensor;
using testing::same_bits;

DecoderConfig tiny(cost::Family family, double dropout = 0) {
  DecoderConfig config = testing::tiny_config();
  if (family == cost::Family::kGpt2) config = testing::tiny_gpt2();
  std::visit([&](auto& c) { c.dropout = dropout; }, config);
  return config;
}

class Decoders : public ::testing::TestWithParam<cost::Family> {};

INSTANTIATE_TEST_SUITE_P(Of, Decoders, ::testing::Values(cost::Family::kLlama, cost::Family::kGpt2),
                         [](const auto& test) { return std::string(name(test.param)); });

// Accumulated over micro-batches, through all layers, against the slope of the summed loss in fp64.
TEST_P(Decoders, GradientsOfTheWholeModelMatchCentralDifferences) {
  const DecoderConfig config = tiny(GetParam(), 0.1);
  const Model model = make_decoder(config);
  std::vector<LayerState> states;
  for (std::size_t i = 0; i < model.size(); ++i) {
    states.push_back(testing::double_state(*model[i], LayerId{static_cast<int>(i)}, 3));
  }
  std::vector<LayerContext> contexts;
  for (int m = 0; m < 3; ++m) {
    contexts.push_back(testing::random_context(shape_of(config), 2, static_cast<std::uint64_t>(m)));
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

TEST_P(Decoders, ATokenChangesNoScoreBeforeIt) {
  const DecoderConfig config = tiny(GetParam());
  const auto [vocabulary, sequence] =
      std::pair(shape_of(config).vocabulary, shape_of(config).sequence);
  const Model model = make_decoder(config);
  const std::vector<LayerState> states = testing::make_states(model, 3);
  const auto scores = [&](const LayerContext& context) {
    at::Tensor hidden;
    for (std::size_t i = 0; i + 1 < model.size(); ++i) {
      hidden = model[i]->forward(states[i], hidden, context, nullptr).hidden.x;
    }
    return logits(config, states.back(), hidden);
  };
  const LayerContext context = testing::random_context(shape_of(config), 1, 4);
  const at::Tensor before = scores(context);
  for (std::int64_t t = 0; t < sequence; ++t) {
    LayerContext changed = context;
    changed.tokens_BT = context.tokens_BT.clone();
    auto& token = changed.tokens_BT.data_ptr<std::int64_t>()[t];
    token = (token + 1) % vocabulary;
    const at::Tensor difference_T = (scores(changed) - before).abs().amax(-1)[0];
    for (std::int64_t s = 0; s < sequence; ++s) {
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

TEST_P(Decoders, LogitsAreThoseOfTheLoss) {
  const DecoderConfig config = tiny(GetParam());
  const Model model = make_decoder(config);
  const LayerState head = make_state(*model.back(), LayerId{5}, 3);
  const LayerContext context = testing::random_context(shape_of(config), 2, 4);
  const at::Tensor hidden = random_tensor({2, 10, 24}, 8, at::kFloat);
  const at::Tensor scores = logits(config, head, hidden);
  const at::Tensor expected =
      at::cross_entropy_loss(scores.view({-1, 19}), context.targets_BT.view(-1));
  const at::Tensor loss = model.back()->forward(head, hidden, context, nullptr).loss;
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-6);
}

TEST_P(Decoders, AnInputGradientNobodyWantsChangesNoWeightGradient) {
  for (const double dropout : {0.0, 0.2}) {
    const DecoderConfig config = tiny(GetParam(), dropout);
    const Model model = make_decoder(config);
    const LayerContext context = testing::random_context(shape_of(config), 2, 4);
    const at::Tensor x = random_tensor({2, 10, 24}, 8, at::kFloat);
    const at::Tensor dy = random_tensor({2, 10, 24}, 9, at::kFloat);
    for (const std::size_t i : {1U, 2U}) {
      std::vector<LayerState> states;
      for (const auto wanted : {Layer::InputGradient::kWanted, Layer::InputGradient::kNotWanted}) {
        states.push_back(make_state(*model[i], LayerId{static_cast<int>(i)}, 3));
        std::unique_ptr<Stash> stash;
        (void)model[i]->forward(states.back(), x, context, &stash);
        const at::Tensor dx = model[i]->input_gradient(states.back(), *stash, dy, wanted);
        EXPECT_EQ(dx.defined(), wanted == Layer::InputGradient::kWanted);
        model[i]->weight_gradient(states.back(), *stash);
      }
      for (std::size_t p = 0; p < states[0].parameters.size(); ++p) {
        EXPECT_TRUE(same_bits(states[0].parameters[p].gradient, states[1].parameters[p].gradient));
      }
    }
  }
}

TEST_P(Decoders, ComputedStashesAreThoseMeasured) {
  for (const cost::Precision precision : {cost::Precision::kFp32, cost::Precision::kBf16}) {
    for (const double dropout : {0.0, 0.1}) {
      const DecoderConfig config = tiny(GetParam(), dropout);
      const Model model = in_precision(make_decoder(config), precision);
      const LayerContext context = testing::random_context(shape_of(config), 3, 4);
      const at::Tensor x = random_tensor({3, 10, 24}, 8, scalar_type(precision));
      for (std::size_t i = 0; i < model.size(); ++i) {
        const LayerId id{static_cast<int>(i)};
        const LayerState state = make_state(*model[i], id, 3);
        const StashBytes bytes =
            measure_stash(*model[i], state, i == 0 ? at::Tensor() : x, context);
        std::visit(
            [&](const auto& c) {
              EXPECT_EQ(bytes.held.value, activation_bytes(c, id, 3, precision).value)
                  << model[i]->name() << " dropout " << dropout << ' ' << x.scalar_type();
              EXPECT_GE(bytes.peak, bytes.held - boundary_bytes(c, 3, precision));
            },
            config);
      }
    }
  }
}

TEST(Decoder, ATieNamesTwoMatricesOfOneShape) {
  Gpt2Config gpt2 = testing::tiny_gpt2();
  LlamaConfig llama = testing::tiny_config();
  EXPECT_TRUE(ties(llama).empty());
  llama.tied_embeddings = true;
  for (const DecoderConfig& config : {DecoderConfig(gpt2), DecoderConfig(llama)}) {
    const Model model = make_decoder(config);
    const auto shape = [&](LayerId layer, const std::string& name) {
      for (const ParameterSpec& spec : model[layer.index()]->parameters()) {
        if (spec.name == name) return spec.shape;
      }
      return std::vector<std::int64_t>();
    };
    const std::vector<Tie> tie = ties(config);
    ASSERT_EQ(tie.size(), 1U);
    const std::vector<std::int64_t> wanted = {19, 24};
    EXPECT_EQ(shape(tie[0].first, tie[0].first_parameter), wanted);
    EXPECT_EQ(shape(tie[0].second, tie[0].second_parameter), wanted);
  }
  gpt2.tied_embeddings = false;
  EXPECT_TRUE(ties(gpt2).empty());
}

TEST(Decoder, AFamilyThatDoesNotExistIsAnErrorWithTheNearest) {
  EXPECT_EQ(cost::parse_family("gpt2").value(), cost::Family::kGpt2);
  EXPECT_EQ(cost::parse_family("gpt-2").error().message,
            "'gpt-2' is no family of models, did you mean 'gpt2'?");
}

}  // namespace
}  // namespace dynmo::model
