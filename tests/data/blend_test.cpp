// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/blend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "dynmo/core/rng.h"

namespace dynmo::data {
namespace {

// Counts samples of the sets one by one. Returns the largest distance of a set from its share of a
// prefix, and checks that a set's samples come in their order.
double farthest(const Blend& blend, std::int64_t samples) {
  const std::vector<std::int64_t>& weights = blend.weights();
  const double sum =
      static_cast<double>(std::accumulate(weights.begin(), weights.end(), std::int64_t{0}));
  std::vector<std::int64_t> count(weights.size(), 0);
  double most = 0;
  for (std::int64_t i = 0; i < samples; ++i) {
    const Blend::Place place = blend.place(i);
    EXPECT_EQ(place.index, count[place.set]) << "sample " << i;
    ++count[place.set];
    for (std::size_t k = 0; k < weights.size(); ++k) {
      const double share = static_cast<double>(weights[k]) * static_cast<double>(i + 1) / sum;
      most = std::max(most, std::abs(share - static_cast<double>(count[k])));
    }
  }
  return most;
}

TEST(Blend, AMillionSamplesOfThreeSetsHoldTheirSharesAtEveryPrefix) {
  EXPECT_LT(farthest(Blend({271, 314, 415}), 1'000'000), 1);
  EXPECT_LT(farthest(Blend({1, 1, 999'998}), 1'000'000), 1);
}

TEST(Blend, AnySharesHoldAtEveryPrefix) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Rng rng(seed);
    std::vector<std::int64_t> weights(1 + rng.below(kMaxBlendParts));
    for (std::int64_t& weight : weights) {
      weight = 1 + static_cast<std::int64_t>(rng.below(rng.below(2) == 0 ? 3 : 400));
    }
    const std::int64_t period = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
    EXPECT_LT(farthest(Blend(weights), 2 * period + 1), 1) << "seed " << seed;
  }
}

std::vector<std::int64_t> weights_of(const std::vector<std::string>& texts) {
  std::vector<std::int64_t> weights;
  const auto parts = parse_blend(texts);
  EXPECT_TRUE(parts) << parts.error().message;
  for (const BlendPart& part : *parts) weights.push_back(part.weight);
  return weights;
}

TEST(Blend, SharesAreExactDecimals) {
  using Weights = std::vector<std::int64_t>;
  EXPECT_EQ(weights_of({"0.3 A", "0.7 B"}), (Weights{3, 7}));
  EXPECT_EQ(weights_of({"3 A", "7.0 B"}), (Weights{3, 7}));
  EXPECT_EQ(weights_of({".25 A", "0.125 B", "2 C"}), (Weights{2, 1, 16}));
  EXPECT_EQ(weights_of({"5 A"}), (Weights{1}));
  EXPECT_EQ(weights_of({"30000000 A", "70000000 B"}), (Weights{3, 7})) << "tokens";
  const std::vector<std::string> texts = {"1  my folder/of text"};
  EXPECT_EQ(parse_blend(texts)->front().path, "my folder/of text");
}

TEST(Blend, WhatIsNoShareIsRefused) {
  const auto error = [](std::vector<std::string> texts) {
    const auto parts = parse_blend(texts);
    return parts ? std::string() : parts.error().message;
  };
  for (const char* text :
       {"", "0.3", "0.3 ", " A", "0 A", "0.0 A", "-1 A", "+1 A", "1e3 A", "nan A", "inf A",
        "0.3.1 A", ". A", "0.0000000001 A", "100000000 A", "99999999999999999999 A"}) {
    EXPECT_EQ(error({text}),
              "data.blend has the part '" + std::string(text) +
                  "', wanted a share above 0 and below 1e8, and a folder, such as '0.3 FOLDER'");
  }
  EXPECT_EQ(error({}), "data.blend has 0 parts, wanted 1 to 64");
  EXPECT_EQ(error(std::vector<std::string>(65, "1 A")), "data.blend has 65 parts, wanted 1 to 64");
  EXPECT_EQ(error({"0.1234567 A", "0.8765433 B"}),
            "data.blend repeats after 10000000 samples, the least in which the shares are whole "
            "numbers: wanted shares of fewer digits, 1000000 samples at most");
}

}  // namespace
}  // namespace dynmo::data
