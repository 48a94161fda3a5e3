// SPDX-License-Identifier: Apache-2.0
// GPT-2's layers against a plain composition of libtorch's operations under autograd in fp64.
#include "dynmo/model/gpt2.h"

#include <gtest/gtest.h>

#include <cmath>

#include "dynmo/model/dropout.h"
#include "gradients.h"
#include "helpers.h"

namespace dynmo::model {
namespace {

using testing::random_tensor;

TEST(Gpt2, NamesAndShapesAreThoseOfHuggingFace) {
  const Gpt2Config config = testing::tiny_gpt2();
  const Model model = make_gpt2(config);
  ASSERT_EQ(model.size(), 6U);
  EXPECT_EQ(model[3]->name(), "blocks.1.attention");
  const auto specs = model[3]->parameters();
  EXPECT_EQ(specs[2].name, "attn.c_attn.weight");
  EXPECT_EQ(specs[2].shape, (std::vector<std::int64_t>{24, 72}));
  EXPECT_EQ(model[4]->parameters()[4].shape, (std::vector<std::int64_t>{20, 24}));
  const auto full = [&](int layer, const char* name) {
    return checkpoint_name(config, decoder_place(LayerId{layer}, 2), name);
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
  EXPECT_EQ(message([](Gpt2Config& c) { c.shape.hidden = 250; }),
            "model.hidden is 250, wanted a multiple of model.heads (8), such as 256");
  EXPECT_EQ(message([](Gpt2Config& c) { c.shape.positions = 100; }),
            "model.positions is 100, wanted at least model.sequence (128), or 0");
  EXPECT_EQ(message([](Gpt2Config& c) { c.norm_epsilon = 0; }),
            "model.norm_epsilon is 0, wanted above 0");
  EXPECT_EQ(message([](Gpt2Config& c) { c.dropout = 1; }),
            "model.dropout is 1, wanted 0 or more and less than 1");
}

struct Gpt2Case {
  std::string kind;
  std::size_t layer;
  double dropout = 0;
};
void PrintTo(const Gpt2Case& c, std::ostream* out) { *out << c.kind << " dropout " << c.dropout; }

class Gpt2Gradients : public ::testing::TestWithParam<Gpt2Case> {
 protected:
  void SetUp() override {
    config_.dropout = GetParam().dropout;
    layer_ = make_gpt2(config_)[GetParam().layer];
    state_ = testing::double_state(*layer_, LayerId{static_cast<int>(GetParam().layer)}, 5);
    context_ = testing::random_context(config_.shape, 3, 9);
    if (GetParam().kind != "embedding") input_ = random_tensor({3, 10, 24}, 21);
  }

  // Returns what dropout multiplies a tensor of ones by.
  [[nodiscard]] at::Tensor mask(std::uint64_t salt) const {
    return dropout(at::ones({3, 10, 24}, at::kDouble), config_.dropout, state_, context_, salt);
  }
  [[nodiscard]] at::Tensor plain(const std::vector<at::Tensor>& p, const at::Tensor& x) const;

  Gpt2Config config_ = testing::tiny_gpt2();
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
  const at::Tensor dy = random_tensor(
      testing::made_by(layer_->forward(state_, input_, context_, nullptr)).sizes(), 51);
  const auto function = [&](const std::vector<at::Tensor>& p, const at::Tensor& x) {
    return plain(p, x);
  };
  const testing::Gradients expected = testing::by_autograd(state_, input_, dy, function);
  testing::expect_near(testing::by_three_calls(*layer_, state_, input_, context_, dy), expected,
                       state_);
}

INSTANTIATE_TEST_SUITE_P(Gpt2, Gpt2Gradients,
                         ::testing::Values(Gpt2Case{"embedding", 0}, Gpt2Case{"embedding", 0, 0.3},
                                           Gpt2Case{"attention", 1}, Gpt2Case{"attention", 1, 0.3},
                                           Gpt2Case{"mlp", 2}, Gpt2Case{"mlp", 2, 0.3},
                                           Gpt2Case{"head", 5}),
                         [](const auto& test) {
                           return test.param.kind + (test.param.dropout > 0 ? "WithDropout" : "");
                         });

}  // namespace
}  // namespace dynmo::model
