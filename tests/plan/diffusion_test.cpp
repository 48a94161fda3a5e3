// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/diffusion.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/plan/cuts.h"

namespace dynmo::plan {
namespace {

using Loads = std::vector<std::int64_t>;

Loads loads_of(const Loads& weights, const std::vector<int>& counts) {
  Loads loads;
  auto layer = weights.begin();
  for (const int count : counts) {
    loads.push_back(std::accumulate(layer, layer + count, std::int64_t{0}));
    layer += count;
  }
  return loads;
}

TEST(Diffusion, NeverRaisesTheLargestLoadAndEndsWhereNoPairCanGain) {
  double max_rounds = 0;  // over the bound
  for (std::uint64_t seed = 0; seed < 10000; ++seed) {
    Rng rng(mix_key({0xD1FF, seed}));
    const int layers = pick(rng, 1, 40);
    Loads weights;
    for (int i = 0; i < layers; ++i) weights.push_back(pick(rng, 0, 20));
    Loads prefix = {0};
    for (const std::int64_t weight : weights) prefix.push_back(prefix.back() + weight);
    std::vector<int> start(static_cast<std::size_t>(pick(rng, 1, std::min(layers, 8))), 1);
    for (int i = static_cast<int>(start.size()); i < layers; ++i) ++start[rng.below(start.size())];

    const Diffusion result = internal::diffuse(prefix, start);
    ASSERT_EQ(std::accumulate(result.counts.begin(), result.counts.end(), 0), layers);
    ASSERT_GE(*std::min_element(result.counts.begin(), result.counts.end()), 1);
    const Loads before = loads_of(weights, start);
    const Loads after = loads_of(weights, result.counts);
    ASSERT_LE(*std::max_element(after.begin(), after.end()),
              *std::max_element(before.begin(), before.end()))
        << "seed " << seed;
    // No pair can make its larger load smaller by moving its boundary by one layer.
    for (std::size_t s = 0; s + 1 < after.size(); ++s) {
      for (const int moved : {-1, 1}) {
        std::vector<int> other = result.counts;
        other[s] += moved;
        other[s + 1] -= moved;
        if (other[s] < 1 || other[s + 1] < 1) continue;
        const Loads now = loads_of(weights, other);
        ASSERT_GE(std::max(now[s], now[s + 1]), std::max(after[s], after[s + 1]))
            << "seed " << seed << ", stage " << s;
      }
    }
    const int ranks = static_cast<int>(start.size());
    if (ranks > 1) {
      max_rounds = std::max(max_rounds, (result.rounds - 1) / diffusion_bound(ranks, layers));
    }
    const Diffusion again = internal::diffuse(prefix, result.counts);
    ASSERT_EQ(again.counts, result.counts) << "seed " << seed;
    ASSERT_EQ(again.rounds, 1) << "seed " << seed;
  }
  EXPECT_LE(max_rounds, 4);  // the bound is an order: it has no constant
  RecordProperty("rounds_over_bound", std::to_string(max_rounds));
}

TEST(Diffusion, StartsFromThePlanInForce) {
  const cost::ModelCost model = equal_model(12, 1e-3);
  const cost::Cluster cluster = cost::equal_ranks(3);
  const Plan current = make_plan({5, 4, 3}, schedule::ScheduleKind::k1F1B);
  BalanceProblem problem{{model, cluster, 4}};
  EXPECT_EQ(diffuse(Balancer::kDiffusionTime, problem)->rounds, 1);  // uniform is even
  problem.current = &current;
  // 5|4|3 is one layer short of even, and no pair sees more than a difference of one layer.
  EXPECT_EQ(diffuse(Balancer::kDiffusionTime, problem)->counts, (std::vector<int>{5, 4, 3}));
  const Plan far = make_plan({10, 1, 1}, schedule::ScheduleKind::k1F1B);
  problem.current = &far;
  const auto result = diffuse(Balancer::kDiffusionTime, problem);
  EXPECT_EQ(result->counts, *balance(Balancer::kDiffusionTime, problem));
  EXPECT_LE(*std::max_element(result->counts.begin(), result->counts.end()), 5);
  EXPECT_GT(result->rounds, 1);
}

TEST(Diffusion, TimeAndParametersLevelWhatTheyAreNamedFor) {
  cost::ModelCost model = equal_model(4, 1e-3);
  model.layers[0].parameter_bytes = Bytes{10000};
  model.layers[3].forward_s = 1;
  const cost::Cluster cluster = cost::equal_ranks(2);
  EXPECT_EQ(*balance(Balancer::kDiffusionParameters, {{model, cluster}}), (std::vector<int>{1, 3}));
  EXPECT_EQ(*balance(Balancer::kDiffusionTime, {{model, cluster}}), (std::vector<int>{3, 1}));
}

TEST(Diffusion, TheBoundIsThePapersFormula) {
  EXPECT_NEAR(diffusion_bound(16, 128), 256 * std::log(128 * 16) * std::log(16), 1e-9);
  EXPECT_NEAR(diffusion_bound(16, 128, 4), 128 * 16 * std::log(16) / 4, 1e-9);
  EXPECT_EQ(diffusion_bound(1, 5), 0);
}

}  // namespace
}  // namespace dynmo::plan
