// SPDX-License-Identifier: Apache-2.0
// GPT-2's layers against a plain composition of libtorch's operations under autograd in fp64, and
// the whole model against central differences.
#include "dynmo/model/gpt2.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "dynmo/model/decoder.h"
#include "dynmo/model/memory.h"
#include "helpers.h"

namespace dynmo::model {
namespace {

using testing::random_tensor;
using testing::same_bits;

// Small, with nothing equal to anything else; fewer tokens than positions.
Gpt2Config tiny_gpt2() {
  Gpt2Config config;
  config.vocabulary = 19;
  config.hidden = 24;
  config.blocks = 2;
  config.heads = 4;
  config.intermediate = 20;
  config.sequence = 10;
  config.positions = 13;
  return config;
}

TEST(Gpt2, NamesAndShapesAreThoseOfHuggingFace) {
  const Gpt2Config config = tiny_gpt2();
  const Model model = make_gpt2(config);
  ASSERT_EQ(model.size(), 6U);
  EXPECT_EQ(model[3]->name(), "blocks.1.attention");
  const auto specs = model[3]->parameters();
  EXPECT_EQ(specs[2].name, "attn.c_attn.weight");
  EXPECT_EQ(specs[2].shape, (std::vector<std::int64_t>{24, 72}));
  EXPECT_EQ(model[4]->parameters()[4].shape, (std::vector<std::int64_t>{20, 24}));
  const auto full = [&](int layer, const char* name) {
    return checkpoint_name(config, LayerId{layer}, name);
  };
  EXPECT_EQ(full(0, "wpe.weight"), "transformer.wpe.weight");
  EXPECT_EQ(full(3, "attn.c_attn.bias"), "transformer.h.1.attn.c_attn.bias");
  EXPECT_EQ(full(4, "mlp.c_fc.weight"), "transformer.h.1.mlp.c_fc.weight");
  EXPECT_EQ(full(5, "ln_f.bias"), "transformer.ln_f.bias");
  EXPECT_EQ(full(5, "lm_head.weight"), "lm_head.weight");
}

TEST(Gpt2, AConfigThatCannotWorkIsRefusedByFieldAndWanted) {
  const auto message = [](auto change) {
    Gpt2Config config;
    change(config);
    const auto result = validate(config);
    return result ? std::string() : result.error().message;
  };
  EXPECT_EQ(message([](Gpt2Config&) {}), "");
  EXPECT_EQ(message([](Gpt2Config& c) { c.hidden = 250; }),
            "model.hidden is 250, wanted a multiple of model.heads (8), such as 256");
  EXPECT_EQ(message([](Gpt2Config& c) { c.positions = 100; }),
            "model.positions is 100, wanted at least the 128 tokens of model.sequence");
  EXPECT_EQ(message([](Gpt2Config& c) { c.norm_epsilon = 0; }),
            "model.norm_epsilon is 0, wanted above 0");
  EXPECT_EQ(message([](Gpt2Config& c) { c.dropout = 1; }),
            "model.dropout is 1, wanted 0 or more and less than 1");
}

struct Case {
  std::string kind;
  std::size_t layer;
  double dropout = 0;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.kind << " dropout " << c.dropout; }

class Gpt2Gradients : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    config_.dropout = GetParam().dropout;
    layer_ = make_gpt2(config_)[GetParam().layer];
    state_ = testing::double_state(*layer_, LayerId{static_cast<int>(GetParam().layer)}, 5);
    context_ = testing::random_context(config_, 3, 9);
    if (GetParam().kind != "embedding") input_ = random_tensor({3, 10, 24}, 21);
  }

  // What dropout multiplies a tensor of ones by.
  [[nodiscard]] at::Tensor mask(std::uint64_t salt) const {
    return dropout(at::ones({3, 10, 24}, at::kDouble), config_.dropout, state_, context_, salt);
  }
  [[nodiscard]] at::Tensor plain(const std::vector<at::Tensor>& p, const at::Tensor& x) const;

  Gpt2Config config_ = tiny_gpt2();
  std::shared_ptr<const Layer> layer_;
  LayerState state_;
  LayerContext context_;
  at::Tensor input_;
};

at::Tensor plain_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor centred = x - x.mean(-1, true);
  return centred / (centred.pow(2).mean(-1, true) + 1e-5).sqrt() * weight + bias;
}

// Nothing that the layers use: explicit mask, softmax, norm and gelu.
at::Tensor Gpt2Gradients::plain(const std::vector<at::Tensor>& p, const at::Tensor& x) const {
  const std::int64_t T = 10;
  if (GetParam().kind == "embedding") {
    return (p[0].index({context_.tokens_BT}) + p[1].narrow(0, 0, T)) * mask(2);
  }
  const at::Tensor n = plain_norm(x, p[0], p[1]);
  if (GetParam().kind == "head") {
    return at::cross_entropy_loss(n.matmul(p[2].t()).view({-1, 19}), context_.targets_BT.view(-1));
  }
  const at::Tensor inner = n.matmul(p[2]) + p[3];
  if (GetParam().kind == "mlp") {
    const at::Tensor u = std::sqrt(2 / M_PI) * (inner + 0.044715 * inner.pow(3));
    const at::Tensor active = 0.5 * inner * (1 + at::tanh(u));
    return x + (active.matmul(p[4]) + p[5]) * mask(1);
  }
  const auto qkv = inner.split(24, -1);
  const auto heads = [&](const at::Tensor& y) { return y.view({3, T, 4, 6}).transpose(1, 2); };
  const at::Tensor later = at::ones({T, T}, at::kBool).triu(1);
  const at::Tensor scores = (heads(qkv[0]).matmul(heads(qkv[1]).transpose(2, 3)) / std::sqrt(6.0))
                                .masked_fill(later, -INFINITY);
  const at::Tensor mixed =
      at::softmax(scores, -1).matmul(heads(qkv[2])).transpose(1, 2).reshape({3, T, 24});
  return x + (mixed.matmul(p[4]) + p[5]) * mask(1);
}

TEST_P(Gpt2Gradients, MatchAPlainCompositionOfOperations) {
  std::vector<at::Tensor> leaves;
  for (const Parameter& p : state_.parameters) {
    leaves.push_back(p.value.clone().set_requires_grad(true));
  }
  const std::vector<at::Tensor> parameters = leaves;
  at::Tensor x;
  if (input_.defined()) leaves.push_back(x = input_.clone().set_requires_grad(true));
  const at::Tensor expected = plain(parameters, x);
  const at::Tensor dy = random_tensor(expected.sizes(), 51);
  const auto gradients = torch::autograd::grad({expected}, leaves, {dy});

  std::unique_ptr<Stash> stash;
  const at::Tensor y = layer_->forward(state_, input_, context_, &stash);
  const at::Tensor dx = layer_->input_gradient(state_, *stash, dy, Layer::InputGradient::kWanted);
  layer_->weight_gradient(state_, *stash);

  EXPECT_TRUE(at::allclose(y, expected, 1e-9, 1e-11));
  ASSERT_EQ(dx.defined(), input_.defined());
  if (dx.defined()) {
    EXPECT_TRUE(at::allclose(dx, gradients.back(), 1e-9, 1e-11));
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    // (A bias of the keys moves all scores of a query alike: its gradient is 0.)
    EXPECT_TRUE(at::allclose(state_.parameters[i].gradient, gradients[i], 1e-9, 1e-11))
        << state_.parameters[i].name;
    EXPECT_GT(gradients[i].abs().max().item<double>(), 1e-4) << "a gradient to compare";
  }
}

INSTANTIATE_TEST_SUITE_P(Gpt2, Gpt2Gradients,
                         ::testing::Values(Case{"embedding", 0}, Case{"embedding", 0, 0.3},
                                           Case{"attention", 1}, Case{"attention", 1, 0.3},
                                           Case{"mlp", 2}, Case{"mlp", 2, 0.3}, Case{"head", 5}),
                         [](const auto& test) {
                           return test.param.kind + (test.param.dropout > 0 ? "WithDropout" : "");
                         });

TEST(Gpt2, GradientsOfTheWholeModelMatchCentralDifferences) {
  Gpt2Config config = tiny_gpt2();
  config.dropout = 0.1;
  const Model model = make_gpt2(config);
  std::vector<LayerState> states;
  for (std::size_t i = 0; i < model.size(); ++i) {
    states.push_back(testing::double_state(*model[i], LayerId{static_cast<int>(i)}, 3));
  }
  const LayerContext context = testing::random_context(config, 2, 1);
  testing::backward(model, states, context);
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
    const auto loss = [&] { return testing::forward(model, states, context).loss.item<double>(); };
    move(kStep, true);
    const double above = loss();
    move(-2 * kStep, false);
    const double slope = (above - loss()) / (2 * kStep);
    move(kStep, false);
    EXPECT_NEAR(slope, expected, 1e-6 * (1 + std::abs(expected))) << "direction " << direction;
  }
}

TEST(Gpt2, LogitsAreThoseOfTheLoss) {
  const Gpt2Config config = tiny_gpt2();
  const Model model = make_gpt2(config);
  const LayerState head = make_state(*model.back(), LayerId{5}, 3);
  const LayerContext context = testing::random_context(config, 2, 4);
  const at::Tensor hidden = random_tensor({2, 10, 24}, 8, at::kFloat);
  const at::Tensor scores = logits(DecoderConfig{config}, head, hidden);
  const at::Tensor expected =
      at::cross_entropy_loss(scores.view({-1, 19}), context.targets_BT.view(-1));
  const at::Tensor loss = model.back()->forward(head, hidden, context, nullptr);
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-6);
}

TEST(Gpt2, AnInputGradientNobodyWantsChangesNoWeightGradient) {
  const Model model = make_gpt2(tiny_gpt2());
  const at::Tensor x = random_tensor({2, 10, 24}, 8, at::kFloat);
  const at::Tensor dy = random_tensor({2, 10, 24}, 9, at::kFloat);
  for (const std::size_t i : {1U, 2U}) {
    std::vector<LayerState> states;
    for (const auto wanted : {Layer::InputGradient::kWanted, Layer::InputGradient::kNotWanted}) {
      states.push_back(make_state(*model[i], LayerId{static_cast<int>(i)}, 3));
      std::unique_ptr<Stash> stash;
      (void)model[i]->forward(states.back(), x, {}, &stash);
      const at::Tensor dx = model[i]->input_gradient(states.back(), *stash, dy, wanted);
      EXPECT_EQ(dx.defined(), wanted == Layer::InputGradient::kWanted);
      model[i]->weight_gradient(states.back(), *stash);
    }
    for (std::size_t p = 0; p < states[0].parameters.size(); ++p) {
      EXPECT_TRUE(same_bits(states[0].parameters[p].gradient, states[1].parameters[p].gradient));
    }
  }
}

TEST(Gpt2, ComputedStashesAreThoseMeasured) {
  for (const Precision precision : {Precision::kFp32, Precision::kBf16}) {
    for (const double p : {0.0, 0.1}) {
      Gpt2Config config = tiny_gpt2();
      config.dropout = p;
      const Model model = in_precision(make_gpt2(config), precision);
      const LayerContext context = testing::random_context(config, 3, 4);
      const at::Tensor x = random_tensor({3, 10, 24}, 8, scalar_type(precision));
      EXPECT_EQ(boundary_bytes(config, 3, precision).value, static_cast<std::int64_t>(x.nbytes()));
      for (std::size_t i = 0; i < model.size(); ++i) {
        const LayerId id{static_cast<int>(i)};
        const LayerState state = make_state(*model[i], id, 3);
        const StashBytes bytes =
            measure_stash(*model[i], state, i == 0 ? at::Tensor() : x, context);
        EXPECT_EQ(bytes.held.value, activation_bytes(config, id, 3, precision).value)
            << model[i]->name() << " dropout " << p << ' ' << x.scalar_type();
      }
    }
  }
}

TEST(Decoder, ATieNamesTwoMatricesOfOneShape) {
  Gpt2Config gpt2 = tiny_gpt2();
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
  EXPECT_EQ(parse_family("gpt2").value(), Family::kGpt2);
  EXPECT_EQ(parse_family("gpt-2").error().message,
            "'gpt-2' is no family of models, did you mean 'gpt2'?");
}

}  // namespace
}  // namespace dynmo::model
