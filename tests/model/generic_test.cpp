// SPDX-License-Identifier: Apache-2.0
// The operations that devices use, run on the CPU against its kernels; and layers on libtorch's
// "meta" device, which knows shapes and devices and no numbers: an operation that mixes devices,
// wants a loop of ours or reads a value fails there as it would elsewhere.
#include "dynmo/kernels/generic.h"

#include <gtest/gtest.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/kernels/select_top.h"
#include "dynmo/model/adamw.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/dropout.h"
#include "dynmo/model/hand_written.h"
#include "dynmo/model/memory.h"
#include "dynmo/model/precision.h"
#include "helpers.h"

namespace dynmo::model {
namespace {

using testing::random_tensor;
using testing::same_bits;

// Largest distance in units of the largest expected element.
double distance(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
  EXPECT_EQ(actual.sizes(), expected.sizes());
  const at::Tensor exact = expected.to(at::kDouble);
  return (actual.to(at::kDouble) - exact).abs().max().item<double>() /
         exact.abs().max().item<double>();
}

class Generic : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  static at::Tensor random(at::IntArrayRef shape, std::uint64_t key) {
    return random_tensor(shape, key, GetParam());
  }
  // A few roundings of the type.
  static double tolerance() {
    if (GetParam() == at::kBFloat16) return 1.0 / 64;
    return GetParam() == at::kDouble ? 1e-13 : 3e-6;
  }
};

TEST_P(Generic, NormIsTheKernels) {
  const at::Tensor x = random({70, 45}, 1);
  const at::Tensor weight = random({45}, 2);
  const auto [y, inverse] = kernels::rms_norm(x, weight, 1e-5);
  const kernels::Normed composed = kernels::generic::rms_norm(x, weight, 1e-5);
  EXPECT_LT(distance(composed.inverse_N1, inverse), tolerance());
  EXPECT_LT(distance(composed.y_ND, y), tolerance());
  const at::Tensor dy = random({70, 45}, 3);
  for (const at::Tensor& residual : {at::Tensor(), random({70, 45}, 4)}) {
    const auto wanted = Layer::InputGradient::kWanted;
    const kernels::NormGradient actual =
        kernels::generic::norm_gradient(dy, x, inverse, weight, wanted, residual);
    const kernels::NormGradient expected =
        kernels::norm_gradient(dy, x, inverse, weight, wanted, residual);
    EXPECT_LT(distance(actual.x_ND, expected.x_ND), tolerance());
    EXPECT_LT(distance(actual.weight_D, expected.weight_D), tolerance());
  }
  const auto not_wanted = Layer::InputGradient::kNotWanted;
  EXPECT_FALSE(
      kernels::generic::norm_gradient(dy, x, inverse, weight, not_wanted, {}).x_ND.defined());
}

TEST_P(Generic, GatedProductIsTheKernels) {
  at::Tensor gate = random({7, 33}, 5);
  at::Tensor up = random({7, 33}, 6);
  at::Tensor product = random({7, 33}, 7);
  EXPECT_LT(distance(kernels::generic::swiglu(gate, up), kernels::swiglu(gate, up)), tolerance());
  at::Tensor g = gate.clone();
  at::Tensor u = up.clone();
  at::Tensor p = product.clone();
  kernels::swiglu_gradient(g, u, p);
  kernels::generic::swiglu_gradient(gate, up, product);
  EXPECT_LT(distance(gate, g), tolerance());
  EXPECT_LT(distance(up, u), tolerance());
  EXPECT_LT(distance(product, p), tolerance());
}

TEST_P(Generic, CrossEntropyIsTheKernels) {
  at::Tensor scores = random({9, 77}, 8).mul_(4);
  at::Tensor kernels = scores.clone();
  const at::Tensor targets = testing::random_tokens(1, 9, 77, 9).flatten();
  EXPECT_LT(distance(kernels::generic::cross_entropy(scores, targets),
                     kernels::cross_entropy(kernels, targets)),
            tolerance());
  EXPECT_LT(distance(scores, kernels), tolerance());
  kernels::generic::cross_entropy_gradient(scores, targets, 0.25);
  kernels::cross_entropy_gradient(kernels, targets, 0.25);
  EXPECT_LT(distance(scores, kernels), tolerance());
}

TEST_P(Generic, RotationIsTheKernelsAndBackUndoesIt) {
  const kernels::RotaryTable table = kernels::rotary_table(13, cost::frequencies({}, 6));
  at::Tensor x = random({2, 11, 3, 6}, 10);
  const at::Tensor before = x.clone();
  at::Tensor kernels = x.clone();
  const kernels::RotaryTable::Angles angles = table.of(x);
  const at::Tensor cosine = angles.cosine.narrow(0, 0, 11);
  const at::Tensor sine = angles.sine.narrow(0, 0, 11);
  kernels::generic::apply_rope(x, cosine, sine, kernels::Rope::kForward);
  kernels::apply_rope(kernels, table, kernels::Rope::kForward);
  EXPECT_LT(distance(x, kernels), tolerance());
  EXPECT_GT(distance(x, before), 0.1);
  kernels::generic::apply_rope(x, cosine, sine, kernels::Rope::kBack);
  EXPECT_LT(distance(x, before), tolerance());
}

TEST_P(Generic, AttentionAndItsGradientAreThoseOfTheCpusOperation) {
  const at::Tensor q = random({2, 11, 3, 6}, 11);
  const at::Tensor k = random({2, 11, 3, 6}, 12);
  const at::Tensor v = random({2, 11, 3, 6}, 13);
  const at::Tensor dy = random({2, 11, 3, 6}, 14);
  const kernels::Attention actual = kernels::generic::causal_attention(q, k, v);
  const kernels::Attention expected = kernels::causal_attention(q, k, v);
  EXPECT_LT(distance(actual.out_BTHK, expected.out_BTHK), tolerance());
  const kernels::AttentionGradient gradient =
      kernels::generic::causal_attention_gradient(dy, q, k, v, actual);
  const kernels::AttentionGradient exact =
      kernels::causal_attention_gradient(dy, q, k, v, expected);
  EXPECT_LT(distance(gradient.q_BTHK, exact.q_BTHK), tolerance());
  EXPECT_LT(distance(gradient.k_BTHK, exact.k_BTHK), tolerance());
  EXPECT_LT(distance(gradient.v_BTHK, exact.v_BTHK), tolerance());
  for (const at::Tensor& x : {gradient.q_BTHK, gradient.k_BTHK, gradient.v_BTHK}) {
    EXPECT_TRUE(x.is_contiguous());
  }
}

TEST_P(Generic, RowsAreAddedToWhereTheirTokensPoint) {
  const auto sums = GetParam() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor actual = random_tensor({7, 5}, 15, sums);
  at::Tensor expected = actual.clone();
  const at::Tensor tokens = testing::random_tokens(3, 11, 7, 16);
  const at::Tensor from = random({3, 11, 5}, 17);
  kernels::generic::add_rows(actual, tokens, from);
  add_rows(expected, tokens, from);
  EXPECT_LT(distance(actual, expected), tolerance());
}

INSTANTIATE_TEST_SUITE_P(Types, Generic, ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16),
                         [](const auto& test) { return std::string(at::toString(test.param)); });

TEST(GenericSelection, IsThatOfTheCpuWithTiesAndNaN) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({0x546F71, seed}));
    const auto tokens = static_cast<std::int64_t>(1 + rng.below(80));
    const auto count = static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(tokens + 1)));
    at::Tensor scores_BT = at::empty({3, tokens});
    std::vector<std::int64_t> expected;
    for (std::int64_t b = 0; b < 3; ++b) {
      const std::span<float> row(scores_BT[b].data_ptr<float>(), static_cast<std::size_t>(tokens));
      for (float& score : row) {
        score = static_cast<float>(rng.below(5)) - 3;
        if (rng.below(20) == 0) score = rng.below(2) == 0 ? NAN : -NAN;
        if (rng.below(30) == 0) score = rng.below(2) == 0 ? -0.0F : -INFINITY;
      }
      const auto chosen = kernels::select_top(std::span<const float>(row), count);
      expected.insert(expected.end(), chosen.begin(), chosen.end());
    }
    const at::Tensor places_BC = kernels::generic::select_top(scores_BT, count);
    ASSERT_EQ(places_BC.sizes(), (std::vector<std::int64_t>{3, count}));
    EXPECT_TRUE(places_BC.flatten().equal(at::tensor(expected, at::kLong))) << "seed " << seed;
  }
}

TEST(GenericMask, IsThatOfTheCpuBitForBit) {
  LayerState state;
  for (const std::int64_t count : {1, 4, 63, 64, 65, 1001}) {
    for (std::uint64_t key = 1; key < 4; ++key) {
      state.random_key = mix_key({key, 0x123456789ABCDEF0});
      const at::Tensor like = at::empty({count}, at::kFloat);
      const LayerContext context;
      const at::Tensor expected = dropout_mask(like, 0.3, state, context, 5);
      const std::uint64_t mixed = mix_key({state.random_key, 0, 0, 5});
      const at::Tensor actual = kernels::generic::keep_mask(
          like, mixed, static_cast<std::uint32_t>(std::llround(0.3 * 0x1p32)));
      EXPECT_TRUE(same_bits(actual, expected)) << count << " elements, key " << key;
    }
  }
}

TEST(GenericSum, OfSquaresIsTheKernels) {
  Parameter parameter;
  parameter.gradient = random_tensor({33, 7}, 18, at::kFloat);
  const double expected = squared_norm(parameter);
  EXPECT_NEAR(kernels::generic::sum_of_squares(parameter.gradient), expected, 1e-12 * expected);
}

// The shapes of operations that libtorch knows on its meta device from Python only.
void expect_meta(std::initializer_list<at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) TORCH_CHECK(tensor.is_meta(), "a tensor elsewhere");
}
at::Tensor index_select(const at::Tensor& x, std::int64_t dim, const at::Tensor& index) {
  expect_meta({x, index});
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = index.numel();
  return at::empty(sizes, x.options());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& dy, const at::Tensor& x, c10::SymIntArrayRef, const at::Tensor& mean,
    const at::Tensor& inverse, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, std::array<bool, 3>) {
  expect_meta({dy, x, mean, inverse, *weight, *bias});
  return {at::empty_like(x), at::empty_like(*weight), at::empty_like(*bias)};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm(const at::Tensor& x, c10::SymIntArrayRef,
                                                          const std::optional<at::Tensor>& weight,
                                                          const std::optional<at::Tensor>& bias,
                                                          double) {
  expect_meta({x, *weight, *bias});
  TORCH_CHECK(weight->scalar_type() == x.scalar_type(), "as CUDA wants it");
  const auto statistics = x.options().dtype(kernels::accumulation_type(x.scalar_type()));
  return {at::empty_like(x), at::empty({x.size(0), 1}, statistics),
          at::empty({x.size(0), 1}, statistics)};
}
at::Tensor log_sum_exp(const at::Tensor& x, at::IntArrayRef dimensions, bool keep) {
  return x.sum(dimensions, keep);  // of the same shape
}
at::Tensor dropout_backward(const at::Tensor& dy, const at::Tensor& mask, double) {
  expect_meta({dy, mask});
  return at::empty_like(dy);
}
TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("index_select", index_select);
  library.impl("logsumexp", log_sum_exp);
  library.impl("native_layer_norm", layer_norm);
  library.impl("native_layer_norm_backward", layer_norm_backward);
  library.impl("native_dropout_backward", dropout_backward);
}

struct DeviceCase {
  cost::Family family = cost::Family::kLlama;
  cost::Precision precision = cost::Precision::kFp32;
};

class OnAnotherDevice : public ::testing::TestWithParam<DeviceCase> {};

TEST_P(OnAnotherDevice, LayersMixNoDevicesAndReadNoValues) {
  const at::Device meta(at::kMeta, 0);
  LlamaConfig llama = testing::tiny_config();
  llama.dropout = 0.1;
  Gpt2Config gpt2;
  gpt2.shape.vocabulary = llama.shape.vocabulary;
  gpt2.shape.hidden = llama.shape.hidden;
  gpt2.shape.blocks = llama.shape.blocks;
  gpt2.shape.heads = llama.shape.heads;
  gpt2.shape.sequence = gpt2.shape.positions = llama.shape.sequence;
  gpt2.dropout = 0.1;
  const DecoderConfig config =
      GetParam().family == cost::Family::kLlama ? DecoderConfig(llama) : DecoderConfig(gpt2);
  const Model model = in_precision(make_decoder(config), GetParam().precision);
  std::vector<LayerState> states;
  for (LayerState& state : testing::make_states(model, 3)) {
    states.push_back(on_device(std::move(state), meta));
  }
  LayerContext context = testing::random_context(llama.shape, 2, 4);
  context.tokens_BT = context.tokens_BT.to(meta);
  context.targets_BT = context.targets_BT.to(meta);
  testing::Pass pass = testing::forward(model, states, context);
  EXPECT_TRUE(pass.loss.is_meta());
  EXPECT_EQ(pass.loss.dim(), 0);
  at::Tensor gradient;
  for (std::size_t i = model.size(); i-- > 0;) {
    gradient = model[i]->input_gradient(states[i], *pass.stashes[i], gradient,
                                        Layer::InputGradient::kWanted);
    model[i]->weight_gradient(states[i], *pass.stashes[i]);
    if (i == 0) break;
    EXPECT_TRUE(gradient.is_meta());
    EXPECT_EQ(gradient.sizes(),
              (std::vector<std::int64_t>{2, llama.shape.sequence, llama.shape.hidden}));
    EXPECT_EQ(gradient.scalar_type(), scalar_type(GetParam().precision));
  }
}

INSTANTIATE_TEST_SUITE_P(Families, OnAnotherDevice,
                         ::testing::Values(DeviceCase{cost::Family::kLlama, cost::Precision::kFp32},
                                           DeviceCase{cost::Family::kLlama, cost::Precision::kBf16},
                                           DeviceCase{cost::Family::kGpt2, cost::Precision::kFp32},
                                           DeviceCase{cost::Family::kGpt2, cost::Precision::kBf16}),
                         [](const auto& test) {
                           return std::string(name(test.param.family)) +
                                  (test.param.precision == cost::Precision::kFp32 ? "Fp32"
                                                                                  : "Bf16");
                         });

}  // namespace
}  // namespace dynmo::model
