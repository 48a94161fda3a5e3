// SPDX-License-Identifier: Apache-2.0
// The building blocks in fp32 and bf16 against libtorch's own operations in fp64, on widths that no
// vector divides. (gradient_test.cpp has whole layers in fp64.)
#include "dynmo/kernels/operations.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/model/helpers.h"

namespace dynmo::kernels {
namespace {

using model::testing::random_tensor;

// Largest distance in units of the largest expected element.
double distance(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.sizes(), expected.sizes());
  const double size = expected.abs().max().item<double>();
  return (actual.to(at::kDouble) - expected).abs().max().item<double>() / size;
}

class Operations : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  // A random tensor of the type and the same numbers in fp64.
  struct Both {
    at::Tensor given;
    at::Tensor exact;
  };
  static Both random(at::IntArrayRef shape, std::uint64_t key) {
    at::Tensor given = random_tensor(shape, key, GetParam());
    return {given, given.to(at::kDouble)};
  }
  // A few roundings of the type.
  static double tolerance() { return GetParam() == at::kBFloat16 ? 1.0 / 128 : 1e-6; }
};

TEST_P(Operations, NormIsThatOfLibtorch) {
  const Both x = random({70, 45}, 1);
  const Both weight = random({45}, 2);
  const auto [y, inverse] = rms_norm(x.given, weight.given, 1e-5);
  const at::Tensor exact = (x.exact.square().mean(-1, true) + 1e-5).rsqrt();
  EXPECT_LT(distance(inverse, exact), 1e-6) << "kept in fp32";
  EXPECT_LT(distance(y, x.exact * exact * weight.exact), tolerance());
  EXPECT_TRUE(model::testing::same_bits(normed_again(x.given, inverse, weight.given, 1e-5), y));
}

TEST_P(Operations, NormGradientIsThatOfItsFormulaAndAddsTheResidual) {
  const Both x = random({70, 45}, 1);
  const Both weight = random({45}, 2);
  const Both gradient = random({70, 45}, 3);
  const Both residual = random({70, 45}, 4);
  const at::Tensor inverse = (x.exact.square().mean(-1, true) + 1e-5).rsqrt();
  const at::Tensor unit = x.exact * inverse;
  const at::Tensor mean = (gradient.exact * weight.exact * unit).mean(-1, true);
  const at::Tensor exact = inverse * (gradient.exact * weight.exact - unit * mean);
  const at::Tensor kept = rms_norm(x.given, weight.given, 1e-5).inverse_N1;

  const NormGradient plain =
      norm_gradient(gradient.given, x.given, kept, weight.given, InputGradient::kWanted);
  EXPECT_LT(distance(plain.x_ND, exact), tolerance());
  EXPECT_LT(distance(plain.weight_D, (gradient.exact * unit).sum(0)), tolerance());
  const NormGradient added = norm_gradient(gradient.given, x.given, kept, weight.given,
                                           InputGradient::kWanted, residual.given);
  EXPECT_LT(distance(added.x_ND, exact + residual.exact), tolerance());
  const NormGradient weight_only =
      norm_gradient(gradient.given, x.given, kept, weight.given, InputGradient::kNotWanted);
  EXPECT_FALSE(weight_only.x_ND.defined());
  EXPECT_TRUE(model::testing::same_bits(weight_only.weight_D, plain.weight_D));
}

TEST_P(Operations, GatedProductAndItsGradientAreThoseOfLibtorch) {
  const Both gate = random({7, 33}, 5);
  const Both up = random({7, 33}, 6);
  const Both slope = random({7, 33}, 7);
  const at::Tensor exact = at::silu(gate.exact) * up.exact;
  EXPECT_LT(distance(swiglu(gate.given, up.given), exact), tolerance());
  at::Tensor g = gate.given.clone();
  at::Tensor u = up.given.clone();
  at::Tensor product = slope.given.clone();
  swiglu_gradient(g, u, product);
  EXPECT_LT(distance(product, exact), tolerance());
  EXPECT_LT(distance(u, slope.exact * at::silu(gate.exact)), tolerance());
  EXPECT_LT(distance(g, at::silu_backward(slope.exact * up.exact, gate.exact)), tolerance());
}

TEST_P(Operations, GatedProductOfFarGatesIsTheirLimit) {
  const at::Tensor gate = at::tensor({-1000.0, -90.0, 90.0, 1000.0}).to(GetParam());
  const at::Tensor product = swiglu(gate, at::ones_like(gate)).to(at::kDouble);
  for (int i = 0; i < 2; ++i) EXPECT_NEAR(product[i].item<double>(), 0, 1e-30) << i;
  for (int i = 2; i < 4; ++i) {
    EXPECT_DOUBLE_EQ(product[i].item<double>(), gate[i].item<double>()) << i;
  }
}

TEST_P(Operations, CrossEntropyAndItsGradientAreThoseOfLibtorch) {
  for (const std::int64_t vocabulary : {5, 32, 77}) {
    Both scores = random({9, vocabulary}, 8);
    scores.given.mul_(8);
    scores.exact = scores.given.to(at::kDouble);
    const at::Tensor targets = model::testing::random_tokens(1, 9, vocabulary, 9).flatten();
    at::Tensor given = scores.given.clone();
    const at::Tensor loss = cross_entropy(given, targets);
    const double exact = at::cross_entropy_loss(scores.exact, targets).item<double>();
    EXPECT_NEAR(loss.item<double>(), exact, 2e-6 * exact) << "summed in fp32 or better";
    const at::Tensor probabilities = at::softmax(scores.exact, -1);
    EXPECT_LT(distance(given, probabilities), tolerance());
    cross_entropy_gradient(given, targets, 0.25);
    const at::Tensor one_hot = at::one_hot(targets, vocabulary).to(at::kDouble);
    EXPECT_LT(distance(given, (probabilities - one_hot) * (0.25 / 9)), tolerance());
  }
}

TEST_P(Operations, WhatIsNoNumberStaysNone) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  at::Tensor gate = at::full({40}, nan, at::TensorOptions().dtype(GetParam()));
  EXPECT_TRUE(swiglu(gate, at::ones_like(gate)).isnan().all().item<bool>());
  at::Tensor scores = at::ones({2, 40}, at::TensorOptions().dtype(GetParam()));
  scores[1][39] = nan;
  EXPECT_TRUE(std::isnan(cross_entropy(scores, at::zeros({2}, at::kLong)).item<double>()));
}

INSTANTIATE_TEST_SUITE_P(Types, Operations, ::testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& test) { return std::string(at::toString(test.param)); });

TEST(CrossEntropy, RefusesATargetOutsideTheVocabulary) {
  at::Tensor scores = at::zeros({1, 4});
  EXPECT_ANY_THROW(static_cast<void>(cross_entropy(scores, at::full({1}, 4, at::kLong))));
  EXPECT_ANY_THROW(static_cast<void>(cross_entropy(scores, at::full({1}, -1, at::kLong))));
}

}  // namespace
}  // namespace dynmo::kernels
