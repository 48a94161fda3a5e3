// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/moe_router.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "dynmo/core/rng.h"
#include "helpers.h"

namespace dynmo::model {
namespace {

using at::Tensor;
using testing::random_tensor;

const std::vector<MoeRouter> kRouters = {MoeRouter::kTopK, MoeRouter::kBias, MoeRouter::kSinkhorn,
                                         MoeRouter::kBalanced, MoeRouter::kExpertChoice};

Tensor bias_of(std::int64_t experts) { return random_tensor({experts}, 9, at::kFloat).mul_(0.1); }

// Every routing has these properties: rows of experts in order, each token's slots pointing to
// them.
void expect_sorted(const Routing& routing, std::int64_t tokens, std::int64_t experts) {
  ASSERT_EQ(std::ssize(routing.offsets), experts + 1);
  ASSERT_EQ(routing.offsets.back(), routing.tokens_A.numel());
  const auto* token = routing.tokens_A.const_data_ptr<std::int32_t>();
  for (std::size_t e = 0; e + 1 < routing.offsets.size(); ++e) {
    EXPECT_LE(routing.offsets[e], routing.offsets[e + 1]);
    for (auto i = routing.offsets[e]; i + 1 < routing.offsets[e + 1]; ++i) {
      EXPECT_LT(token[i], token[i + 1]);
    }
  }
  const std::int64_t slots = routing.places_NK.size(1);
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < tokens * slots; ++i) {
    const std::int32_t place = routing.places_NK.const_data_ptr<std::int32_t>()[i];
    if (place < 0) continue;
    ++kept;
    ASSERT_LT(place, routing.tokens_A.numel());
    EXPECT_EQ(token[place], i / slots);
    const auto e = static_cast<std::size_t>(routing.experts_NK.const_data_ptr<std::int32_t>()[i]);
    EXPECT_LE(routing.offsets[e], place);
    EXPECT_LT(place, routing.offsets[e + 1]);
  }
  EXPECT_EQ(kept, routing.offsets.back());
}

TEST(MoeRouter, SortsWhatItChoosesWhateverTheScores) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({0x4D4F45, seed}));
    RouterOptions options;
    options.router = kRouters[rng.below(kRouters.size())];
    options.experts = static_cast<std::int64_t>(1 + rng.below(9));
    options.top_k =
        static_cast<std::int64_t>(1 + rng.below(static_cast<std::uint64_t>(options.experts)));
    options.capacity_factor = rng.below(2) == 0 ? 0 : rng.uniform() * 2;
    options.drop = rng.below(2) == 0 ? MoeDrop::kPosition : MoeDrop::kProbability;
    const auto tokens = static_cast<std::int64_t>(rng.below(40));
    Tensor scores = random_tensor({tokens, options.experts}, seed, at::kFloat);
    if (rng.below(2) == 0) scores.round_();  // ties
    if (rng.below(10) == 0 && tokens > 0) scores[0][0] = std::nan("");
    const Tensor bias = bias_of(options.experts);
    const Routing routing = route(options, scores, bias, Pass::kTraining);
    expect_sorted(routing, tokens, options.experts);
    EXPECT_TRUE(route(options, scores, bias, Pass::kTraining).places_NK.equal(routing.places_NK));
    const Tensor none = at::zeros(routing.gates_NK.sizes(), at::kFloat);
    EXPECT_EQ(routing_gradient(options, routing, none, 1).sizes(), scores.sizes());
    if (HasFailure()) {
      ADD_FAILURE() << "seed " << seed;
      return;
    }
  }
}

TEST(MoeRouter, GivesTiesToTheLowerIndex) {
  const Tensor scores = at::zeros({4, 5}, at::kFloat);
  for (const MoeRouter router : {MoeRouter::kTopK, MoeRouter::kBias, MoeRouter::kSinkhorn}) {
    const RouterOptions options{.router = router, .experts = 5, .top_k = 2};
    const Routing routing = route(options, scores, at::zeros({5}), Pass::kTraining);
    EXPECT_EQ(routing.assigned, (std::vector<std::int64_t>{4, 4, 0, 0, 0}));
  }
  const RouterOptions choice{.router = MoeRouter::kExpertChoice, .experts = 5, .top_k = 2};
  const Routing routing = route(choice, scores, {}, Pass::kTraining);
  EXPECT_EQ(routing.assigned, (std::vector<std::int64_t>(5, 2)));
  EXPECT_EQ(routing.tokens_A.max().item<int>(), 1);
}

TEST(MoeRouter, GatesDoNotDependOnTheBias) {
  const Tensor scores = random_tensor({50, 6}, 3);
  const RouterOptions options{.router = MoeRouter::kBias, .experts = 6, .top_k = 2};
  const Tensor bias = random_tensor({6}, 4, at::kFloat);
  const Routing biased = route(options, scores, bias, Pass::kTraining);
  const Routing plain = route(options, scores, at::zeros({6}), Pass::kTraining);
  EXPECT_FALSE(biased.experts_NK.equal(plain.experts_NK));
  const Tensor chosen = scores.gather(1, biased.experts_NK.to(at::kLong));
  EXPECT_TRUE(at::allclose(biased.gates_NK, chosen.softmax(1), 1e-12, 1e-12));
}

// Independent of the sort in the router: the positions of a running count.
TEST(MoeRouter, DropsWhatIsBeyondCapacityByPositionOrByProbability) {
  const Tensor scores = random_tensor({60, 4}, 5);
  for (const MoeRouter router : kRouters) {
    if (router == MoeRouter::kExpertChoice) continue;
    for (const MoeDrop drop : {MoeDrop::kPosition, MoeDrop::kProbability}) {
      const RouterOptions options{
          .router = router, .experts = 4, .top_k = 2, .capacity_factor = 0.7, .drop = drop};
      const std::int64_t capacity = 21;  // 0.7 x 2 x 60 / 4
      const Routing routing = route(options, scores, at::zeros({4}), Pass::kTraining);
      for (int e = 0; e < 4; ++e) {
        std::vector<std::pair<double, int>> order;
        for (int n = 0; n < 60; ++n) {
          for (int k = 0; k < 2; ++k) {
            if (routing.experts_NK[n][k].item<int>() != e) continue;
            const double gate = routing.gates_NK[n][k].item<double>();
            order.emplace_back(drop == MoeDrop::kPosition ? n : -gate, n);
          }
        }
        EXPECT_EQ(std::ssize(order), routing.assigned[static_cast<std::size_t>(e)]);
        std::ranges::sort(order);
        order.resize(std::min<std::size_t>(order.size(), capacity));
        std::vector<int> kept;
        for (const auto& [unused, n] : order) kept.push_back(n);
        std::ranges::sort(kept);
        const auto first = routing.offsets[static_cast<std::size_t>(e)];
        const auto last = routing.offsets[static_cast<std::size_t>(e) + 1];
        std::vector<int> got;
        for (auto i = first; i < last; ++i) got.push_back(routing.tokens_A[i].item<int>());
        EXPECT_EQ(got, kept);
      }
      EXPECT_GT(routing.dropped(), 0);
      EXPECT_EQ(route(options, scores, at::zeros({4}), Pass::kGeneration).dropped(), 0);
    }
  }
}

TEST(MoeRouter, AuxiliaryLossIsAlphaWhereAllExpertsAreEqual) {
  // Each token one expert, all experts alike often; p is even.
  Tensor scores = at::zeros({64, 8}, at::kDouble);
  for (int n = 0; n < 64; ++n) scores[n][n % 8] = 1e-9;
  const RouterOptions options{.experts = 8, .top_k = 1, .aux_loss = 0.37};
  EXPECT_NEAR(route(options, scores, {}, Pass::kTraining).aux_loss, 0.37, 1e-8);
  scores.select(1, 2).add_(2);
  EXPECT_GT(route(options, scores, {}, Pass::kTraining).aux_loss, 0.37 * 2);
}

TEST(MoeRouter, SinkhornsColumnsSumToOneOverTheExpertsAndRowsComeNear) {
  constexpr int kRows = 512;
  constexpr int kExperts = 8;
  const Tensor z = random_tensor({kRows, kExperts}, 11).add_(random_tensor({kExperts}, 12));
  const std::vector<double> pi =
      sinkhorn({z.const_data_ptr<double>(), static_cast<std::size_t>(z.numel())}, kExperts);
  std::vector<double> columns(kExperts);
  double worst = 0;
  for (int n = 0; n < kRows; ++n) {
    double row = 0;
    for (int e = 0; e < kExperts; ++e) {
      const double share = pi[static_cast<std::size_t>(n * kExperts + e)];
      row += share;
      columns[static_cast<std::size_t>(e)] += share;
    }
    worst = std::max(worst, std::abs(row * kRows - 1));
  }
  for (const double column : columns) EXPECT_NEAR(column, 1. / kExperts, 1e-6);
  EXPECT_LT(worst, 1e-6);
  // The order within a row is not that of z: columns that all want are marked down.
  const RouterOptions options{.router = MoeRouter::kSinkhorn, .experts = kExperts, .top_k = 1};
  const auto counts = route(options, z, {}, Pass::kTraining).assigned;
  const auto raw = route(options, z, {}, Pass::kValidation).assigned;
  EXPECT_LT(*std::ranges::max_element(counts), *std::ranges::max_element(raw));
}

TEST(MoeRouter, BalancedAndExpertChoiceGiveAllExpertsEquallyMany) {
  const Tensor z = random_tensor({96, 6}, 13).add_(random_tensor({6}, 14).mul_(3));
  for (const MoeRouter router : {MoeRouter::kBalanced, MoeRouter::kExpertChoice}) {
    const RouterOptions options{.router = router, .experts = 6, .top_k = 2};
    EXPECT_EQ(route(options, z, {}, Pass::kTraining).assigned, (std::vector<std::int64_t>(6, 32)));
  }
  const RouterOptions half{
      .router = MoeRouter::kExpertChoice, .experts = 6, .top_k = 2, .capacity_factor = 0.5};
  EXPECT_EQ(route(half, z, {}, Pass::kTraining).assigned, (std::vector<std::int64_t>(6, 16)));
}

// The order of steps that the source takes, without a model: popular experts lose their lead.
TEST(MoeRouter, ABiasAgainstTheCountsEvensThemOut) {
  constexpr int kExperts = 8;
  const RouterOptions options{.router = MoeRouter::kBias, .experts = kExperts, .top_k = 2};
  const Tensor popular = random_tensor({kExperts}, 21).mul_(0.8);
  Tensor bias = at::zeros({kExperts}, at::kFloat);
  const auto violation = [&](int step) {
    const Tensor z =
        random_tensor({512, kExperts}, mix_key({7, static_cast<std::uint64_t>(step)})) + popular;
    const auto counts = route(options, z, bias, Pass::kTraining).assigned;
    const double mean = 1024. / kExperts;
    for (int e = 0; e < kExperts; ++e) {
      const auto count = static_cast<double>(counts[static_cast<std::size_t>(e)]);
      bias[e] += count < mean ? 1e-3 : count > mean ? -1e-3 : 0;
    }
    return static_cast<double>(*std::ranges::max_element(counts)) / mean - 1;
  };
  EXPECT_GE(violation(0), 1);
  for (int step = 1; step < 300; ++step) (void)violation(step);
  EXPECT_LE(violation(300), 0.3);
}

}  // namespace
}  // namespace dynmo::model
