// SPDX-License-Identifier: Apache-2.0
// Norms, products and attention on the strict device by the fused operators that CUDA has. Numbers
// are those of the CPU's loops. A fused operator that lacks a part of its state is found.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "dynmo/c10d/determinism.h"
#include "dynmo/kernels/device/launcher.h"
#include "dynmo/kernels/generic.h"
#include "dynmo/kernels/operations.h"
#include "tests/model/helpers.h"
#include "tests/support/strict_device/strict_device.h"

namespace dynmo::kernels {
namespace {

using at::Tensor;
using c10d::Determinism;
using model::testing::random_tensor;
using model::testing::same_bits;

double apart(const Tensor& device, const Tensor& cpu) {
  EXPECT_EQ(device.scalar_type(), cpu.scalar_type());
  EXPECT_EQ(device.sizes(), cpu.sizes());
  const Tensor exact = cpu.to(at::kDouble);
  return (device.to(at::kCPU).to(at::kDouble) - exact).abs().max().item<double>() /
         exact.abs().max().item<double>();
}

// A few roundings of the type.
double roundings(at::ScalarType type) {
  if (type == at::kBFloat16) return 1.0 / 64;
  return type == at::kDouble ? 1e-13 : 3e-6;
}

// Norms by the kernels of libtorch, without our own.
class FusedNorm : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override { device::use_kernels(false); }
  void TearDown() override { device::use_kernels(true); }

  const at::Device device_ = strict::open();
  const Tensor x_ = random_tensor({70, 45}, 1, GetParam());
  const Tensor weight_ = random_tensor({45}, 2, GetParam());
};

TEST_P(FusedNorm, IsTheCpusAndTheSameOnceMore) {
  const auto [y, inverse] = rms_norm(x_, weight_, 1e-5);
  const Tensor x = x_.to(device_);
  const Tensor weight = weight_.to(device_);
  const Normed fused = rms_norm(x, weight, 1e-5);
  EXPECT_LT(apart(fused.y_ND, y), roundings(GetParam()));
  EXPECT_LT(apart(fused.inverse_N1, inverse), 3e-6);
  EXPECT_TRUE(same_bits(normed_again(x, fused.inverse_N1, weight, 1e-5).cpu(), fused.y_ND.cpu()));
  EXPECT_TRUE(strict::operators_used().contains("aten::_fused_rms_norm"));
}

TEST_P(FusedNorm, GradientsAreTheCpusAndTheWeightsKeepsItsSum) {
  const Tensor dy_ND = random_tensor({70, 45}, 3, GetParam());
  const Tensor inverse = rms_norm(x_, weight_, 1e-5).inverse_N1;
  const auto on_device = [&](InputGradient wanted, const Tensor& residual) {
    return norm_gradient(dy_ND.to(device_), x_.to(device_), inverse.to(device_),
                         weight_.to(device_), wanted,
                         residual.defined() ? residual.to(device_) : residual);
  };
  const auto wanted = InputGradient::kWanted;
  for (const Tensor& residual : {Tensor(), random_tensor({70, 45}, 4, GetParam())}) {
    const NormGradient expected = norm_gradient(dy_ND, x_, inverse, weight_, wanted, residual);
    const NormGradient fused = on_device(wanted, residual);
    EXPECT_LT(apart(fused.x_ND, expected.x_ND), roundings(GetParam()));
    EXPECT_LT(apart(fused.weight_D, expected.weight_D), 3e-6) << "no rounding to bf16";
  }
  const NormGradient alone = on_device(InputGradient::kNotWanted, {});
  EXPECT_FALSE(alone.x_ND.defined());
  EXPECT_TRUE(same_bits(alone.weight_D.cpu(), on_device(wanted, {}).weight_D.cpu()));
  if (GetParam() != at::kBFloat16) {
    EXPECT_TRUE(strict::operators_used().contains("aten::_fused_rms_norm_backward"));
  }
}

INSTANTIATE_TEST_SUITE_P(Of, FusedNorm, ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16),
                         [](const auto& test) { return std::string(at::toString(test.param)); });

TEST(FusedNormOfTypes, OtherTypesThanItsWeightsAreRefusedThereAndComposedHere) {
  const at::Device device = strict::open();
  const Tensor x = random_tensor({6, 16}, 1, at::kBFloat16).to(device);
  const Tensor weight = random_tensor({16}, 2, at::kFloat).to(device);
  EXPECT_THROW(at::_fused_rms_norm(x, {16}, weight, 1e-5), c10::Error);
  const auto [y, inverse] = rms_norm(x, weight, 1e-5);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_THROW(at::_fused_rms_norm_backward(y, x, {16}, inverse, weight, {true, true}), c10::Error);
  const NormGradient gradient = norm_gradient(y, x, inverse, weight, InputGradient::kWanted);
  EXPECT_EQ(gradient.x_ND.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(gradient.x_ND.cpu().isfinite().all().item<bool>());
}

TEST(FusedProduct, OfBf16IsAddedInFp32WithoutARounding) {
  const at::Device device = strict::open();
  const Tensor a_KM = random_tensor({33, 12}, 1, at::kBFloat16);
  const Tensor b_KN = random_tensor({33, 20}, 2, at::kBFloat16);
  const Tensor before = random_tensor({12, 20}, 3, at::kFloat);
  const Tensor exact = at::addmm(before, a_KM.t().to(at::kFloat), b_KN.to(at::kFloat));
  Tensor sum = before.to(device);
  const void* const place = sum.storage().data();
  generic::add_product(sum, a_KM.to(device), b_KN.to(device));
  EXPECT_LT(apart(sum, exact), 1e-6);
  EXPECT_EQ(sum.storage().data(), place) << "in place";
  const Tensor rounded = before + at::mm(a_KM.t(), b_KN);
  EXPECT_GT(apart(rounded, exact), 1e-4) << "what a rounding would cost";
  Tensor composed = before.clone();
  generic::add_product(composed, a_KM, b_KN);
  EXPECT_TRUE(same_bits(composed, rounded)) << "where there is no kernel";
}

// The checks of _addmm_dtype_out_cuda.
TEST(FusedProduct, RefusesTheTypesThatCudaRefuses) {
  const at::Device device = strict::open();
  const auto matrix = [&](at::ScalarType type) { return at::zeros({8, 8}, type).to(device); };
  const Tensor half = matrix(at::kBFloat16);
  const Tensor wide = matrix(at::kFloat);
  const Tensor exact = matrix(at::kDouble);
  Tensor to_wide = matrix(at::kFloat);
  Tensor to_half = matrix(at::kBFloat16);
  EXPECT_NO_THROW(at::addmm_out(to_wide, to_wide, half, half, at::kFloat));
  EXPECT_NO_THROW(at::addmm_out(to_wide, half, half, half, at::kFloat));
  EXPECT_NO_THROW(at::addmm_out(to_half, half, half, half, at::kBFloat16));
  EXPECT_THROW(at::addmm_out(to_wide, to_wide, half, wide, at::kFloat), c10::Error);
  EXPECT_THROW(at::addmm_out(to_wide, exact, half, half, at::kFloat), c10::Error);
  EXPECT_THROW(at::addmm_out(to_half, half, half, half, at::kFloat), c10::Error);
  EXPECT_THROW(at::addmm_out(to_half, half, wide, wide, at::kBFloat16), c10::Error);
}

struct AttentionCell {
  at::ScalarType type;
  Determinism determinism;
};

class FusedAttention : public ::testing::TestWithParam<AttentionCell> {
 protected:
  void SetUp() override {
    device_ = strict::open();
    c10d::set_determinism(GetParam().determinism);
  }
  void TearDown() override { c10d::set_determinism(Determinism::kDemanded); }

  // T of no round size. Two heads of q read one of k.
  Tensor drawn(std::int64_t heads, std::uint64_t key) const {
    return random_tensor({2, 13, heads, 16}, key, GetParam().type);
  }
  AttentionGradient gradient_of(const Attention& attention) const {
    return causal_attention_gradient(dy_.to(device_), q_.to(device_), k_.to(device_),
                                     v_.to(device_), attention);
  }
  Attention on_device() const {
    return causal_attention(q_.to(device_), k_.to(device_), v_.to(device_));
  }
  [[nodiscard]] bool is_cudnn() const {
    return GetParam().type == at::kBFloat16 && GetParam().determinism == Determinism::kNotDemanded;
  }
  [[nodiscard]] double tolerance() const { return 2 * roundings(GetParam().type); }

  at::Device device_ = at::kCPU;
  const Tensor q_ = drawn(4, 1);
  const Tensor k_ = drawn(2, 2);
  const Tensor v_ = drawn(2, 3);
  const Tensor dy_ = drawn(4, 4);
};

TEST_P(FusedAttention, IsThatOfTheCpuWithTheOperatorOfItsTypeAndDeterminism) {
  const Attention expected = causal_attention(q_, k_, v_);
  const Attention actual = on_device();
  EXPECT_LT(apart(actual.out_BTHK, expected.out_BTHK), tolerance());
  // Each operator leaves logarithms and draws of its own shapes.
  const std::vector<std::int64_t> logs = actual.log_sum_exp.sizes().vec();
  if (GetParam().type == at::kDouble) {
    EXPECT_EQ(logs, (std::vector<std::int64_t>{2, 4, 13}));
    EXPECT_FALSE(actual.draws[0].defined());
  } else if (GetParam().type == at::kFloat) {
    EXPECT_EQ(logs, (std::vector<std::int64_t>{2, 4, 32}));
  } else if (is_cudnn()) {
    EXPECT_EQ(logs, (std::vector<std::int64_t>{2, 4, 13, 1}));
    EXPECT_EQ(actual.draws[0].dim() + actual.draws[1].dim(), 0);
  } else {
    EXPECT_EQ(logs, (std::vector<std::int64_t>{2, 4, 13}));
    EXPECT_EQ(actual.draws[0].numel(), 2);
  }
  const AttentionGradient wanted = causal_attention_gradient(dy_, q_, k_, v_, expected);
  const AttentionGradient found = gradient_of(actual);
  EXPECT_LT(apart(found.q_BTHK, wanted.q_BTHK), tolerance());
  EXPECT_LT(apart(found.k_BTHK, wanted.k_BTHK), tolerance());
  EXPECT_LT(apart(found.v_BTHK, wanted.v_BTHK), tolerance());
}

TEST_P(FusedAttention, AWrongPartOfItsStateIsFound) {
  const Attention whole = on_device();
  const AttentionGradient right = gradient_of(whole);
  Attention other = whole;
  other.log_sum_exp = whole.log_sum_exp + 0.5;
  EXPECT_GT(apart(gradient_of(other).v_BTHK, right.v_BTHK.cpu()), 0.1);
  other = whole;
  other.out_BTHK = whole.out_BTHK * 2;
  EXPECT_GT(apart(gradient_of(other).q_BTHK, right.q_BTHK.cpu()), 0.1);
  if (!whole.draws[0].defined()) return;
  other = whole;
  other.draws = {};
  EXPECT_THROW(gradient_of(other), c10::Error) << "the draws are left out";
  other = whole;
  other.log_sum_exp = whole.log_sum_exp.flatten();
  EXPECT_THROW(gradient_of(other), c10::Error) << "logarithms of another operator";
}

TEST_P(FusedAttention, CudnnIsRefusedWhereEqualBitsAreDemanded) {
  if (!is_cudnn()) return;
  const Attention left = on_device();
  c10d::set_determinism(Determinism::kDemanded);
  const Tensor q = q_.to(device_).transpose(1, 2);
  EXPECT_THROW(at::_scaled_dot_product_cudnn_attention(q, q, q, {}, true, 0.0, true), c10::Error);
  EXPECT_THROW(gradient_of(left), c10::Error) << "its state is none of flash's";
}

INSTANTIATE_TEST_SUITE_P(Of, FusedAttention,
                         ::testing::Values(AttentionCell{at::kFloat, Determinism::kDemanded},
                                           AttentionCell{at::kDouble, Determinism::kDemanded},
                                           AttentionCell{at::kBFloat16, Determinism::kDemanded},
                                           AttentionCell{at::kFloat, Determinism::kNotDemanded},
                                           AttentionCell{at::kBFloat16, Determinism::kNotDemanded}),
                         [](const auto& test) {
                           return std::string(at::toString(test.param.type)) +
                                  (test.param.determinism == Determinism::kDemanded ? ""
                                                                                    : "_fastest");
                         });

}  // namespace
}  // namespace dynmo::kernels
