// SPDX-License-Identifier: Apache-2.0
// Attention of sections of rows against the formula_of_rows with a mask written out, in fp64 under
// autograd, and against attention of whole sequences, bit for bit.
#include "dynmo/kernels/ragged_attention.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/kernels/attention_impl.h"
#include "tests/model/helpers.h"

namespace dynmo::kernels {
namespace {

using model::testing::random_tensor;
using model::testing::same_bits;

// Draws sections of at most `longest` rows, each of `tokens` positions with the given probability.
RaggedRows random_rows(Rng& rng, int sections, std::int64_t tokens, double kept) {
  RaggedRows rows{.offsets = {0}, .positions = {}};
  for (int s = 0; s < sections; ++s) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (rng.uniform() < kept) rows.positions.push_back(static_cast<std::int32_t>(t));
    }
    rows.offsets.push_back(std::ssize(rows.positions));
  }
  return rows;
}

// [N, M]: whether the query sees the key.
at::Tensor seen_of(const Ragged& ragged) {
  const auto n = std::ssize(ragged.queries.positions);
  const auto m = std::ssize(ragged.keys.positions);
  at::Tensor seen = at::zeros({n, m}, at::kBool);
  auto* element = seen.data_ptr<bool>();
  for (std::size_t s = 0; s + 1 < ragged.queries.offsets.size(); ++s) {
    for (auto i = ragged.queries.offsets[s]; i < ragged.queries.offsets[s + 1]; ++i) {
      for (auto j = ragged.keys.offsets[s]; j < ragged.keys.offsets[s + 1]; ++j) {
        const auto query = ragged.queries.positions[static_cast<std::size_t>(i)];
        const auto key = ragged.keys.positions[static_cast<std::size_t>(j)];
        element[i * m + j] = ragged.mask == Mask::kStrict ? key < query : key <= query;
      }
    }
  }
  return seen;
}

at::Tensor formula_of_rows(const at::Tensor& q_NHK, const at::Tensor& k_MGK,
                           const at::Tensor& v_MGK, const at::Tensor& seen_NM) {
  const std::int64_t group = q_NHK.size(1) / k_MGK.size(1);
  const auto heads = [&](const at::Tensor& x) {
    return x.repeat_interleave(group, 1).transpose(0, 1);
  };
  const at::Tensor scores = q_NHK.transpose(0, 1).matmul(heads(k_MGK).transpose(1, 2)) /
                            std::sqrt(static_cast<double>(q_NHK.size(2)));
  // (Not by infinities: a row without a key would be not a number.)
  const at::Tensor weights = at::where(seen_NM, scores, at::full({}, -1e300, at::kDouble));
  const at::Tensor highest = at::amax(weights, {-1}, true).detach();
  const at::Tensor exponentials =
      at::where(seen_NM, (weights - highest).exp(), at::zeros({}, at::kDouble));
  const at::Tensor sums = exponentials.sum(-1, true);
  const at::Tensor probabilities =
      exponentials / at::where(sums == 0, at::ones({}, at::kDouble), sums);
  return probabilities.matmul(heads(v_MGK)).transpose(0, 1);
}

double distance_of_rows(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.sizes(), expected.sizes());
  if (actual.numel() == 0) return 0;
  return (actual - expected).abs().max().item<double>() /
         std::max(1.0, expected.abs().max().item<double>());
}

TEST(RaggedAttention, IsTheMaskedFormulaAndSoAreItsGradients) {
  constexpr std::uint64_t kSeed = 20;
  bool empty_rows = false;
  bool nothing = false;
  for (std::uint64_t i = 0; i < 500; ++i) {
    Rng rng(mix_key({kSeed, i}));
    const auto tokens = static_cast<std::int64_t>(rng.below(i % 10 == 0 ? 200 : 40));
    const auto sections = static_cast<int>(rng.below(4)) + 1;
    Ragged ragged{.queries = random_rows(rng, sections, tokens, rng.uniform()),
                  .keys = {},
                  .mask = i % 2 == 0 ? Mask::kCausal : Mask::kStrict};
    ragged.keys = i % 3 == 0 ? random_rows(rng, sections, tokens, rng.uniform()) : ragged.queries;
    const auto n = std::ssize(ragged.queries.positions);
    const auto m = std::ssize(ragged.keys.positions);
    const auto key_heads = static_cast<std::int64_t>(rng.below(2)) + 1;
    const auto heads = key_heads * (static_cast<std::int64_t>(rng.below(2)) + 1);
    const auto size = static_cast<std::int64_t>(rng.below(9)) + 1;
    std::vector<at::Tensor> leaves;
    for (const auto& [rows, of] : {std::pair{n, heads}, {m, key_heads}, {m, key_heads}}) {
      leaves.push_back(random_tensor({rows, of, size}, rng.next()).set_requires_grad(true));
    }
    const at::Tensor slope = random_tensor({n, heads, size}, rng.next());
    const at::Tensor seen = seen_of(ragged);
    EXPECT_EQ(pairs_of(ragged), seen.sum().item<std::int64_t>());
    empty_rows |= m > 0 && n > 0 && !seen.any(1).all().item<bool>();
    nothing |= n == 0;
    at::Tensor expected = at::zeros_like(slope);
    std::vector<at::Tensor> gradients;
    for (at::Tensor& leaf : leaves) gradients.push_back(at::zeros_like(leaf));
    if (n > 0 && m > 0) {
      expected = formula_of_rows(leaves[0], leaves[1], leaves[2], seen);
      expected.backward(slope);
      for (std::size_t leaf = 0; leaf < 3; ++leaf) gradients[leaf] = leaves[leaf].grad();
    }
    const at::NoGradGuard no_graph;
    const RaggedAttention attention = ragged_attention(leaves[0], leaves[1], leaves[2], ragged);
    const RaggedGradient gradient =
        ragged_attention_gradient(slope, leaves[0], leaves[1], leaves[2], attention, ragged);
    const std::string where = fmt::format("seed {}, case {}", kSeed, i);
    EXPECT_LT(distance_of_rows(attention.out_NHK, expected), 1e-12) << where;
    EXPECT_LT(distance_of_rows(gradient.q_NHK, gradients[0]), 1e-12) << where;
    EXPECT_LT(distance_of_rows(gradient.k_MGK, gradients[1]), 1e-12) << where;
    EXPECT_LT(distance_of_rows(gradient.v_MGK, gradients[2]), 1e-12) << where;
    if (HasFailure()) return;
  }
  EXPECT_TRUE(empty_rows);
  EXPECT_TRUE(nothing);
}

TEST(RaggedAttention, HasTheBitsOfWholeSequences) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    if (!has_blocked_attention(type)) continue;
    for (const std::int64_t tokens : {1, 10, 64, 130}) {
      const at::Tensor q = random_tensor({3, tokens, 4, 16}, 1, type);
      const at::Tensor k = random_tensor({3, tokens, 2, 16}, 2, type);
      const at::Tensor v = random_tensor({3, tokens, 2, 16}, 3, type);
      const at::Tensor slope = random_tensor({3, tokens, 4, 16}, 4, type);
      RaggedRows rows{.offsets = {0, tokens, 2 * tokens, 3 * tokens},
                      .positions = std::vector<std::int32_t>(static_cast<std::size_t>(3 * tokens))};
      for (std::int64_t i = 0; i < 3 * tokens; ++i) {
        rows.positions[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i % tokens);
      }
      const Ragged ragged{.queries = rows, .keys = rows};
      const auto flat = [](const at::Tensor& x) { return x.flatten(0, 1); };
      const Attention whole = blocked_attention(q, k, v);
      const RaggedAttention attention = ragged_attention(flat(q), flat(k), flat(v), ragged);
      EXPECT_TRUE(same_bits(attention.out_NHK, flat(whole.out_BTHK)));
      const AttentionGradient expected = blocked_attention_gradient(slope, q, k, v, whole);
      const RaggedGradient gradient =
          ragged_attention_gradient(flat(slope), flat(q), flat(k), flat(v), attention, ragged);
      EXPECT_TRUE(same_bits(gradient.q_NHK, flat(expected.q_BTHK)));
      EXPECT_TRUE(same_bits(gradient.k_MGK, flat(expected.k_BTHK)));
      EXPECT_TRUE(same_bits(gradient.v_MGK, flat(expected.v_BTHK)));
    }
  }
}

}  // namespace
}  // namespace dynmo::kernels
