// SPDX-License-Identifier: Apache-2.0
// The blocked attention against the formula in fp64, differentiated by autograd: blocks that are
// not full, several of them, key heads that query heads share, tensors that are views.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "dynmo/kernels/attention_impl.h"
#include "dynmo/kernels/products.h"
#include "tests/model/helpers.h"

namespace dynmo::kernels {
namespace {

using model::testing::random_tensor;
using model::testing::same_bits;

struct Shape {
  std::int64_t sequences, tokens, heads, key_heads, size;
};

at::Tensor formula(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHK) {
  const std::int64_t T = q_BTHK.size(1);
  const std::int64_t group = q_BTHK.size(2) / k_BTHK.size(2);
  const auto heads = [&](const at::Tensor& x) {
    return x.repeat_interleave(group, 2).transpose(1, 2);
  };
  const at::Tensor hidden = at::ones({T, T}, at::kBool).triu(1);
  const at::Tensor scores = q_BTHK.transpose(1, 2).matmul(heads(k_BTHK).transpose(2, 3)) /
                            std::sqrt(static_cast<double>(q_BTHK.size(3)));
  return at::softmax(scores.masked_fill(hidden, -INFINITY), -1)
      .matmul(heads(v_BTHK))
      .transpose(1, 2);
}

// Where MKL's products are the same on one thread and inside two.
bool is_intel() {
  std::ifstream file("/proc/cpuinfo");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return text.find("GenuineIntel") != std::string::npos;
}

class BlockedAttention : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    if (!has_blocked_attention(GetParam())) {
      GTEST_SKIP() << "this libtorch or processor has no such product of " << GetParam();
    }
  }
  // The tolerance is relative to the largest element. bf16: probabilities, their gradients and
  // results are rounded once each.
  static double tolerance() {
    if (GetParam() == at::kDouble) return 1e-13;
    return GetParam() == at::kFloat ? 2e-6 : 2.0 / 128;
  }
  static double distance(const at::Tensor& actual, const at::Tensor& expected) {
    EXPECT_EQ(actual.sizes(), expected.sizes());
    EXPECT_EQ(actual.scalar_type(), GetParam());
    EXPECT_TRUE(actual.is_contiguous());
    return (actual.to(at::kDouble) - expected).abs().max().item<double>() /
           expected.abs().max().item<double>();
  }
};

TEST_P(BlockedAttention, IsTheFormulaAndSoIsItsGradient) {
  std::uint64_t key = 1;
  for (const Shape& s : {Shape{2, 1, 2, 2, 8}, Shape{2, 10, 4, 2, 6}, Shape{1, 64, 3, 3, 16},
                         Shape{2, 65, 6, 2, 24}, Shape{1, 200, 4, 1, 32}}) {
    // Views into one tensor, as GPT-2's query, key and value are.
    const at::Tensor all = random_tensor({s.sequences, s.tokens, s.heads + 2 * s.key_heads, s.size},
                                         ++key, GetParam());
    const at::Tensor q = all.narrow(2, 0, s.heads);
    const at::Tensor k = all.narrow(2, s.heads, s.key_heads);
    const at::Tensor v = all.narrow(2, s.heads + s.key_heads, s.key_heads);
    const at::Tensor slope =
        random_tensor({s.sequences, s.tokens, s.heads, s.size}, ++key, GetParam());

    std::vector<at::Tensor> leaves;
    for (const at::Tensor& x : {q, k, v}) {
      leaves.push_back(x.to(at::kDouble).clone().set_requires_grad(true));
    }
    const at::Tensor expected = formula(leaves[0], leaves[1], leaves[2]);
    expected.backward(slope.to(at::kDouble));

    const Attention attention = blocked_attention(q, k, v);
    const AttentionGradient gradient = blocked_attention_gradient(slope, q, k, v, attention);
    const std::string where =
        fmt::format("{} tokens, {} of {} heads", s.tokens, s.key_heads, s.heads);
    EXPECT_LT(distance(attention.out_BTHK, expected), tolerance()) << where;
    EXPECT_LT(distance(gradient.v_BTHK, leaves[2].grad()), tolerance()) << where;
    if (s.tokens == 1) continue;  // the only key weighs 1: nothing changes with q and k
    EXPECT_LT(distance(gradient.q_BTHK, leaves[0].grad()), tolerance()) << where;
    EXPECT_LT(distance(gradient.k_BTHK, leaves[1].grad()), tolerance()) << where;
  }
}

TEST_P(BlockedAttention, HasTheSameBitsOnOneThreadAndOnTwo) {
  const at::Tensor q = random_tensor({2, 70, 4, 16}, 1, GetParam());
  const at::Tensor k = random_tensor({2, 70, 2, 16}, 2, GetParam());
  const at::Tensor v = random_tensor({2, 70, 2, 16}, 3, GetParam());
  const int before = at::get_num_threads();
  std::vector<Attention> attentions;
  std::vector<AttentionGradient> gradients;
  for (const int threads : {1, 2}) {
    at::set_num_threads(threads);
    attentions.push_back(blocked_attention(q, k, v));
    gradients.push_back(blocked_attention_gradient(q, q, k, v, attentions.back()));
  }
  at::set_num_threads(before);
  EXPECT_LT(distance(attentions[0].out_BTHK, attentions[1].out_BTHK.to(at::kDouble)), tolerance());
  EXPECT_LT(distance(gradients[0].q_BTHK, gradients[1].q_BTHK.to(at::kDouble)), tolerance());
  if (!is_intel()) {
    GTEST_SKIP() << "the library's products depend on the thread count on this processor";
  }
  EXPECT_TRUE(same_bits(attentions[0].out_BTHK, attentions[1].out_BTHK));
  EXPECT_TRUE(same_bits(gradients[0].q_BTHK, gradients[1].q_BTHK));
  EXPECT_TRUE(same_bits(gradients[0].k_BTHK, gradients[1].k_BTHK));
  EXPECT_TRUE(same_bits(gradients[0].v_BTHK, gradients[1].v_BTHK));
}

INSTANTIATE_TEST_SUITE_P(Types, BlockedAttention,
                         ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16),
                         [](const auto& type) { return std::string(at::toString(type.param)); });

TEST(Products, OfBf16AddIntoFp32WithoutRoundingBetween) {
  if (!has_products<c10::BFloat16>()) GTEST_SKIP() << "no product of bf16 into fp32 here";
  const at::Tensor a = random_tensor({50, 2, 33}, 1, at::kBFloat16).select(1, 1);  // rows apart
  const at::Tensor b = random_tensor({41, 50}, 2, at::kBFloat16).t();              // columns, too
  at::Tensor sum = random_tensor({33, 41}, 3, at::kFloat);
  const at::Tensor expected = sum.to(at::kDouble) + a.to(at::kDouble).t().mm(b.to(at::kDouble));
  add_product(sum, a, b);
  EXPECT_LT((sum.to(at::kDouble) - expected).abs().max().item<double>(), 1e-5);
}

}  // namespace
}  // namespace dynmo::kernels
