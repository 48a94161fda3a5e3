// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/moe/load.h"

#include <gtest/gtest.h>

#include <cmath>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/sparse_attention/load.h"
#include "tests/dynamism/shapes.h"

namespace dynmo::dynamism {
namespace {

// The kernel of the pairs that are left never holds the scores of all pairs.
TEST(SparseAttention, CostsTheSameBesideAnUnfusedDenseModel) {
  const LoadInputs fused = inputs_of(gpt(3, 512, 4096));
  LoadInputs unfused = fused;
  unfused.shape.fused_attention = false;
  EXPECT_EQ((*make_sparse_attention({}, unfused))->at(3),
            (*make_sparse_attention({}, fused))->at(3));
  EXPECT_GT(dense(unfused).layers[1].forward_s, dense(fused).layers[1].forward_s);
}

// Without tiles, and with positions independent of buckets, the share of causal pairs in one bucket
// is sum_u (n_u / s)^2 = kappa / nb.
TEST(SparseAttention, CountsThePairsOfEqualBuckets) {
  constexpr int kTokens = 4096;
  for (const int buckets : {1, 4, 16}) {
    for (const double skew : {0.0, 0.5, 1.0}) {
      Rng rng(mix_key({0x5AA, static_cast<std::uint64_t>(buckets)}));
      const std::vector<double> share = zipf(buckets, skew);
      std::vector<std::int64_t> seen(static_cast<std::size_t>(buckets), 0);
      double pairs = 0;
      for (int token = 0; token < kTokens; ++token) {
        double left = rng.uniform();
        std::size_t bucket = 0;
        while (bucket + 1 < share.size() && left >= share[bucket]) left -= share[bucket++];
        pairs += static_cast<double>(seen[bucket]++);
      }
      double kappa = 0;
      for (const std::int64_t n : seen) {
        kappa += buckets * std::pow(static_cast<double>(n) / kTokens, 2);
      }
      const double counted = 2 * pairs / (static_cast<double>(kTokens) * kTokens);
      EXPECT_NEAR(core_share(kappa, buckets, 0, kTokens), counted, 1e-3)
          << buckets << " buckets, skew " << skew;
    }
  }
}

TEST(SparseAttention, LiesBetweenOneBucketInNbAndDense) {
  EXPECT_DOUBLE_EQ(core_share(1, 16, 128, 16'384), 1.0 / 16 * (1 + 0.125));
  EXPECT_DOUBLE_EQ(core_share(16, 16, 128, 16'384), 1);  // one bucket: dense, and no more
  EXPECT_DOUBLE_EQ(core_share(1, 1, 128, 2048), 1);
  EXPECT_LT(core_share(2, 16, 128, 8192), core_share(3, 16, 128, 8192));
}

// A model whose every layer has this skew, always.
cost::ModelCost with_skew(double skew, const LoadInputs& inputs) {
  SparseAttentionOptions p;
  p.min_skew = p.max_skew = skew;
  p.drift = p.micro_batch_noise = 0;
  p.buckets = 1024;  // so that even buckets leave next to nothing of the core
  p.block = 0;
  return (*make_sparse_attention(p, inputs))->at(0);
}

// A block has 24 T h^2 of products and 2 T s h of a causal core: without the core it is 1 and with
// all of it 1 + s / (12 h), which is 1.9 at s = 8k, h = 768 and 2.8 at s = 16k, of the forward
// pass.
TEST(SparseAttention, SpreadsWholeBlocksAsFarAsTheirCores) {
  const auto forward = [](const cost::ModelCost& model) {
    return model.layers[1].forward_s + model.layers[2].forward_s;
  };
  for (const auto& [sequence, spread] : {std::pair{8192, 1.9}, {16'384, 2.8}}) {
    const LoadInputs inputs = inputs_of(gpt(1, 768, sequence));
    EXPECT_NEAR(forward(with_skew(1, inputs)) / forward(with_skew(0, inputs)), spread, 0.03);
    EXPECT_NEAR(forward(with_skew(1, inputs)), forward(dense(inputs)), 1e-6 * spread);
  }
}

TEST(SparseAttention, OnlyAttentionChanges) {
  const LoadInputs inputs = inputs_of(gpt(3, 512, 4096));
  const auto all = dense(inputs);
  const auto now = (*make_sparse_attention({}, inputs))->at(3);
  for (std::size_t i = 0; i < now.layers.size(); ++i) {
    const bool attention = i % 2 == 1 && i + 1 < now.layers.size();
    if (!attention) {
      EXPECT_EQ(now.layers[i], all.layers[i]) << i;
      continue;
    }
    EXPECT_LT(now.layers[i].forward_s, all.layers[i].forward_s);
    EXPECT_LT(now.layers[i].backward_input_s, all.layers[i].backward_input_s);
    EXPECT_DOUBLE_EQ(now.layers[i].backward_weight_s, all.layers[i].backward_weight_s);
    // Indices, 4 a T of 2 bytes, and copies of q, k, v.
    const auto& s = inputs.shape;
    EXPECT_EQ((now.layers[i].activation_bytes - all.layers[i].activation_bytes).value,
              4 * s.heads * s.tokens() * 2 + 3 * 2 * s.tokens() * s.hidden);
  }
}

// Layers differ for good; a layer's own skew moves slowly, micro-batches around it.
TEST(SparseAttention, LayersDifferMoreThanSteps) {
  const LoadInputs inputs = inputs_of(gpt(16, 512, 8192), 5);
  const auto load = make_sparse_attention({}, inputs);
  double layers = 0;
  double steps = 0;
  for (std::int64_t step = 0; step < 100; ++step) {
    const auto a = (*load)->at(step);
    const auto b = (*load)->at(step + 1);
    for (std::size_t i = 3; i + 1 < a.layers.size(); i += 2) {
      layers += std::abs(a.layers[i].forward_s - a.layers[i - 2].forward_s);
      steps += std::abs(a.layers[i].forward_s - b.layers[i].forward_s);
    }
  }
  EXPECT_GT(layers, 3 * steps);
  EXPECT_GT(steps, 0);
}

TEST(SparseAttention, FaultsNameTheField) {
  const LoadInputs inputs = inputs_of(gpt(1, 512, 512));
  SparseAttentionOptions p;
  p.max_skew = 1.5;
  EXPECT_EQ(make_sparse_attention(p, inputs).error().message,
            "sparse_attention.max_skew is 1.5, wanted 0 to 1");
  p = {};
  p.buckets = 0;
  EXPECT_NE(make_sparse_attention(p, inputs).error().message.find("buckets"), std::string::npos);
}

}  // namespace
}  // namespace dynmo::dynamism
