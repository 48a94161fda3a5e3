// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/json.h"
#include "dynmo/tensor/features.h"
#include "dynmo/tensor/generate.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::tensor {
namespace {

SparseTensor counts_tensor(const std::string& text, const CountsRequest& request) {
  SparseTensor tensor{.sizes = {static_cast<std::uint64_t>(request.steps),
                                static_cast<std::uint64_t>(request.blocks),
                                static_cast<std::uint64_t>(request.experts)},
                      .names = {"step", "block", "expert"},
                      .indices = {{}, {}, {}}};
  std::uint32_t step = 0;
  for (std::size_t begin = 0; begin < text.size(); ++step) {
    const std::size_t end = text.find('\n', begin);
    const Json line = *parse_json(std::string_view(text).substr(begin, end - begin), "counts");
    EXPECT_EQ(line["step"].get<std::uint32_t>(), step);
    std::uint32_t block = 0;
    for (const Json& row : line["sources"]["moe"]["counts"]) {
      std::uint32_t expert = 0;
      std::uint64_t sum = 0;
      for (const Json& count : row) {
        sum += count.get<std::uint64_t>();
        if (count.get<double>() > 0) {
          tensor.indices[0].push_back(step);
          tensor.indices[1].push_back(block);
          tensor.indices[2].push_back(expert);
          tensor.values.push_back(count.get<double>());
        }
        ++expert;
      }
      EXPECT_EQ(sum, request.tokens);
      ++block;
    }
    begin = end + 1;
  }
  EXPECT_EQ(step, request.steps);
  return tensor;
}

Expected<Features> features_of_counts(const CountsRequest& request) {
  std::string text;
  DYNMO_TRY(generate_counts(request, [&](std::string_view piece) -> Expected<void> {
    text += piece;
    return {};
  }));
  return features_of(counts_tensor(text, request), {.along = 0});
}

TEST(GenerateCounts, HaveTheSpreadAndTheAutocorrelationThatWereAsked) {
  for (const double cv : {0.2, 0.8, 1.5}) {
    for (const double autocorrelation : {0.0, 0.5, 0.95}) {
      const CountsRequest request{.steps = 400,
                                  .blocks = 6,
                                  .experts = 16,
                                  .tokens = 8192,
                                  .cv = cv,
                                  .autocorrelation = autocorrelation};
      const auto features = features_of_counts(request);
      ASSERT_TRUE(features) << features.error().message;
      EXPECT_NEAR(features->values->all.cv, cv, 0.02 * cv) << cv << " " << autocorrelation;
      EXPECT_NEAR(features->along->autocorrelation, autocorrelation, 0.03)
          << cv << " " << autocorrelation;
    }
  }
}

TEST(GenerateCounts, LikeFeaturesHaveTheseFeatures) {
  const CountsRequest request{.steps = 300,
                              .blocks = 8,
                              .experts = 8,
                              .tokens = 4096,
                              .cv = 0.9,
                              .lasting_cv = 0.6,
                              .autocorrelation = 0.9};
  const auto features = features_of_counts(request);
  ASSERT_TRUE(features) << features.error().message;
  auto like = counts_request_like(*features);
  ASSERT_TRUE(like) << like.error().message;
  like->seed = 99;
  const auto again = features_of_counts(*like);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_NEAR(again->values->all.cv, features->values->all.cv, 0.02 * features->values->all.cv);
  const double lasting = features->fibers[0].values->all.cv;
  EXPECT_NEAR(again->fibers[0].values->all.cv, lasting, 0.02 * lasting);
  EXPECT_NEAR(again->along->autocorrelation, features->along->autocorrelation, 0.03);
}

TEST(GenerateCounts, LikeThoseOfMoreExpertsHaveALargerLargestShare) {
  const CountsRequest request{.steps = 100,
                              .blocks = 4,
                              .experts = 16,
                              .tokens = 4096,
                              .cv = 0.4,
                              .autocorrelation = 0.5,
                              .max_share = 0.125};
  for (const std::int64_t experts : {2, 8, 32}) {
    const CountsRequest other = resized(request, 100, 4, experts);
    EXPECT_EQ(other.max_share, std::min(2.0 / static_cast<double>(experts), 1.0));
    const auto features = features_of_counts(other);
    ASSERT_TRUE(features) << experts << ": " << features.error().message;
    EXPECT_NEAR(features->values->all.cv, 0.4, 0.02 * 0.4) << experts;
    EXPECT_LE(features->values->max, other.max_share * 4096 + 1) << experts;
  }
  CountsRequest unlimited = request;
  unlimited.max_share = 1;
  EXPECT_EQ(resized(unlimited, 100, 4, 32).max_share, 1);
}

// The profile of so few counts is chance, and other draws drift by another amount.
TEST(GenerateCounts, LikeThoseOfAShortRecordingOfFewBlocksCanBeMade) {
  int made = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const CountsRequest request{.steps = 52 + static_cast<std::int64_t>(seed % 3) * 10,
                                .blocks = 1 + static_cast<std::int64_t>(seed % 2),
                                .experts = 10,
                                .tokens = 4000,
                                .cv = 0.8,
                                .autocorrelation = 0.85,
                                .seed = seed};
    const auto features = features_of_counts(request);
    if (!features) continue;  // too few draws for such an autocorrelation
    auto like = counts_request_like(*features);
    ASSERT_TRUE(like) << seed << ": " << like.error().message;
    like->seed = 99;
    const auto again = features_of_counts(*like);
    ASSERT_TRUE(again) << seed << ": " << again.error().message;
    const double cv = features->values->all.cv;
    EXPECT_NEAR(again->values->all.cv, cv, 0.02 * cv) << seed;
    EXPECT_NEAR(again->along->autocorrelation, features->along->autocorrelation, 0.03) << seed;
    ++made;
  }
  EXPECT_GT(made, 20);
}

// No row can be so uneven that the last block is thirty times as uneven as the others.
TEST(GenerateCounts, WhereTheProfileCannotBeMetTheOtherFeaturesAre) {
  const CountsRequest request{.steps = 200,
                              .blocks = 4,
                              .experts = 8,
                              .tokens = 4096,
                              .cv = 0.6,
                              .autocorrelation = 0.5,
                              .max_share = 0.25,
                              .uneven = {.steps = {}, .rows = {1, 1, 1, 30}}};
  const auto features = features_of_counts(request);
  ASSERT_TRUE(features) << features.error().message;
  EXPECT_NEAR(features->values->all.cv, 0.6, 0.02 * 0.6);
  EXPECT_NEAR(features->along->autocorrelation, 0.5, 0.03);
  EXPECT_LE(features->values->max, 0.25 * 4096 + 1);
  const std::vector<double>& rows = features->uneven->rows;
  EXPECT_GT(rows[3], 2 * std::max({rows[0], rows[1], rows[2]}));
}

TEST(GenerateCounts, AreUnevenWhereAndWhenTheyWereAsked) {
  const CountsRequest request{.steps = 320,
                              .blocks = 12,
                              .experts = 8,
                              .tokens = 4096,
                              .cv = 0.7,
                              .autocorrelation = -0.3,
                              .max_share = 0.5,
                              .uneven = {.steps = {2, 1, 1, 0.5}, .rows = {1, 1, 1, 2, 2, 3}}};
  const auto features = features_of_counts(request);
  ASSERT_TRUE(features) << features.error().message;
  EXPECT_NEAR(features->values->all.cv, 0.7, 0.02 * 0.7);
  EXPECT_NEAR(features->along->autocorrelation, -0.3, 0.03);
  EXPECT_LE(features->values->max, 0.5 * 4096 + 1);
  ASSERT_TRUE(features->uneven);
  const auto& [steps, rows] = *features->uneven;
  ASSERT_EQ(steps.size(), kMaxStepParts);
  ASSERT_EQ(rows.size(), 12U);
  const auto mean = [](const std::vector<double>& values, std::size_t begin, std::size_t end) {
    return std::accumulate(values.begin() + static_cast<std::ptrdiff_t>(begin),
                           values.begin() + static_cast<std::ptrdiff_t>(end), 0.0) /
           static_cast<double>(end - begin);
  };
  const double of_all = mean(rows, 0, 12);
  for (std::size_t part = 0; part < 6; ++part) {
    EXPECT_NEAR(mean(rows, 2 * part, 2 * part + 2) / of_all, request.uneven.rows[part] * 6 / 10.0,
                0.02)
        << part;
  }
  for (std::size_t part = 0; part < 4; ++part) {
    EXPECT_NEAR(mean(steps, 16 * part, 16 * part + 16) / of_all,
                request.uneven.steps[part] * 4 / 4.5, 0.02)
        << part;
  }
  // ... and features of it give the like, at another size too.
  auto like = counts_request_like(*features);
  ASSERT_TRUE(like) << like.error().message;
  like->seed = 5;
  const auto again = features_of_counts(*like);
  ASSERT_TRUE(again) << again.error().message;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    EXPECT_NEAR(again->uneven->rows[row], rows[row], 0.05 * rows[row]) << row;
  }
  like->blocks = 24;
  const auto scaled = features_of_counts(*like);
  ASSERT_TRUE(scaled) << scaled.error().message;
  EXPECT_NEAR(mean(scaled->uneven->rows, 0, 6) / mean(scaled->uneven->rows, 18, 24), 1 / 2.5, 0.04);
}

// Nothing changes from step to step, so that the autocorrelation does not count.
TEST(GenerateCounts, OfAnEvenLoadAreAsEqualAsWholeNumbersCanBe) {
  for (const std::int64_t experts : {7, 8, 96}) {
    const CountsRequest request{.steps = 20,
                                .blocks = 3,
                                .experts = experts,
                                .tokens = 500,
                                .cv = 0,
                                .autocorrelation = 0.9};
    const auto features = features_of_counts(request);
    ASSERT_TRUE(features) << experts << ": " << features.error().message;
    const std::int64_t least = 500 / experts;
    EXPECT_EQ(features->values->all.min, static_cast<double>(least)) << experts;
    EXPECT_LE(features->values->max, static_cast<double>(least + 1)) << experts;
    EXPECT_EQ(features->along->autocorrelation, 0) << experts;
  }
}

TEST(GenerateCounts, NeverChangeIfAllOfTheirSpreadLasts) {
  const CountsRequest request{.steps = 30,
                              .blocks = 4,
                              .experts = 8,
                              .tokens = 4096,
                              .cv = 0.7,
                              .lasting_cv = 0.7,
                              .autocorrelation = 0.9};
  const auto features = features_of_counts(request);
  ASSERT_TRUE(features) << features.error().message;
  EXPECT_NEAR(features->values->all.cv, 0.7, 0.02 * 0.7);
  EXPECT_NEAR(features->fibers[0].values->all.cv, features->values->all.cv, 1e-12);
  EXPECT_EQ(features->along->autocorrelation, 0);
}

TEST(GenerateCounts, NamesTheRequestsThatContradictEachOther) {
  const auto fault = [](const CountsRequest& request) {
    const auto features = features_of_counts(request);
    return features ? "" : features.error().message;
  };
  EXPECT_EQ(fault({.steps = 10, .blocks = 1, .experts = 1, .tokens = 10}),
            "the number of experts is 1, wanted 2 to 65536");
  EXPECT_EQ(fault({.steps = 10, .blocks = 1, .experts = 4, .tokens = 10, .autocorrelation = 1}),
            "the autocorrelation is 1, wanted above -1 and below 1");
  EXPECT_EQ(fault({.steps = 10, .blocks = 1, .experts = 4, .tokens = 10, .max_share = 0.25}),
            "the largest share of an expert is 0.25, wanted above 0.25, at most 1");
  EXPECT_EQ(fault({.steps = 10, .blocks = 1, .experts = 4, .tokens = 10, .max_share = 1.5}),
            "the largest share of an expert is 1.5, wanted above 0.25, at most 1");
  EXPECT_EQ(
      fault({.steps = 10, .blocks = 1, .experts = 4, .tokens = 1000, .cv = 0.5, .lasting_cv = 0.6}),
      "the lasting coefficient of variation is 0.6, wanted 0 to that of all counts, 0.5");
  EXPECT_EQ(fault({.steps = 10'000'000, .blocks = 1, .experts = 64, .tokens = 1000}),
            "10000000 steps of 64 experts have 640000000 values, wanted at most 2^26: choose fewer "
            "steps");
  EXPECT_EQ(fault({.steps = 10, .blocks = 65536, .experts = 1024, .tokens = 1000}),
            "65536 blocks of 1024 experts have 67108864 series of counts, wanted at most 2^24");
  const std::string cv = fault({.steps = 100, .blocks = 4, .experts = 4, .tokens = 1000, .cv = 3});
  EXPECT_NE(cv.find("contradicts 4 experts"), std::string::npos) << cv;
}

// The text of a load trace as a tensor of its layers' seconds.
Expected<Features> features_of_costs(const CostsRequest& request) {
  std::string text;
  DYNMO_TRY(generate_costs(request, [&](std::string_view piece) -> Expected<void> {
    text += piece;
    return {};
  }));
  SparseTensor tensor{.sizes = {static_cast<std::uint64_t>(request.steps),
                                static_cast<std::uint64_t>(request.layers)},
                      .names = {"step", "layer"},
                      .indices = {{}, {}}};
  std::uint32_t step = 0;
  for (std::size_t at = text.find('\n') + 1; at < text.size(); ++step) {
    const std::size_t end = text.find('\n', at);
    const Json line = parse_json(std::string_view(text).substr(at, end - at), "a line").value();
    at = end + 1;
    EXPECT_EQ(line["step"], step);
    for (std::uint32_t layer = 0; layer < line["forward_s"].size(); ++layer) {
      tensor.indices[0].push_back(step);
      tensor.indices[1].push_back(layer);
      tensor.values.push_back(3 * line["forward_s"][layer].get<double>());
    }
  }
  return features_of(tensor, {.along = 0});
}

TEST(GenerateCosts, HaveTheTimeTheSpreadAndTheAutocorrelationThatWereAsked) {
  const CostsRequest request{.steps = 400,
                             .layers = 48,
                             .step_s = 0.25,
                             .cv = 0.7,
                             .lasting_cv = 0.4,
                             .autocorrelation = 0.9};
  const auto features = features_of_costs(request);
  ASSERT_TRUE(features) << features.error().message;
  EXPECT_NEAR(features->values->sum, 400 * 0.25, 1e-6);
  EXPECT_NEAR(features->values->all.cv, 0.7, 0.02 * 0.7);
  EXPECT_NEAR(features->along->autocorrelation, 0.9, 0.03);
  auto like = costs_request_like(*features);
  ASSERT_TRUE(like) << like.error().message;
  EXPECT_NEAR(like->step_s, 0.25, 1e-8);
  EXPECT_NEAR(*like->lasting_cv, 0.4, 0.02 * 0.4);
  like->seed = 5;
  const auto again = features_of_costs(*like);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_NEAR(again->values->all.cv, features->values->all.cv, 0.02 * 0.7);
  EXPECT_NEAR(again->along->autocorrelation, features->along->autocorrelation, 0.03);
}

TEST(GenerateCosts, OfAnEvenLoadAreEqualForAnyNumberOfLayers) {
  for (const std::int64_t layers : {2, 7, 48, 100}) {
    const auto features = features_of_costs(
        {.steps = 10, .layers = layers, .step_s = 0.5, .cv = 0, .autocorrelation = 0.9});
    ASSERT_TRUE(features) << layers << ": " << features.error().message;
    EXPECT_LT(features->values->all.cv, 1e-8) << layers;
    EXPECT_NEAR(features->values->sum, 10 * 0.5, 1e-6) << layers;
  }
}

// Seconds that differ between layers and never change.
Features constant_costs(std::uint32_t steps, std::uint32_t layers) {
  SparseTensor tensor{.sizes = {steps, layers}, .names = {"step", "layer"}, .indices = {{}, {}}};
  for (std::uint32_t step = 0; step < steps; ++step) {
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      tensor.indices[0].push_back(step);
      tensor.indices[1].push_back(layer);
      tensor.values.push_back(0.1 + 0.07 * (layer * layer % 11));
    }
  }
  return features_of(tensor, {.along = 0}).value();
}

TEST(GenerateCosts, LikeFeaturesWithThePersistenceOfLayersAreRefused) {
  Features features = constant_costs(10, 4);
  ASSERT_TRUE(costs_request_like(features));
  features.along->mode = 1;
  const auto like = costs_request_like(features);
  ASSERT_FALSE(like);
  EXPECT_NE(like.error().message.find("their persistence along the steps"), std::string::npos);
}

TEST(GenerateCosts, LikeALoadThatNeverChangesDoNotChangeEither) {
  for (const std::uint32_t steps : {1U, 7U, 10U, 50U, 333U}) {
    const Features features = constant_costs(steps, 12);
    const auto like = costs_request_like(features);
    ASSERT_TRUE(like) << like.error().message;
    for (const std::int64_t other : {steps, 40U}) {
      const auto again = features_of_costs(resized(*like, other, 24));
      ASSERT_TRUE(again) << steps << " to " << other << ": " << again.error().message;
      const double cv = features.values->all.cv;
      EXPECT_NEAR(again->values->all.cv, cv, 0.02 * cv) << steps << " to " << other;
      EXPECT_NEAR(again->fibers[0].values->all.cv, again->values->all.cv, 1e-9);
      EXPECT_EQ(again->along->autocorrelation, 0) << steps << " to " << other;
    }
  }
}

// Ten times the steps: what drift has left in 60 steps is no lasting part of 600.
TEST(GenerateCosts, OfMoreStepsKeepWhatLastsAndNotWhatDriftLeft) {
  for (const double lasting_cv : {0.0, 0.4}) {
    // The lasting coefficient of variation over n steps: an autocorrelation of r leaves
    // ((1 + r) / (1 - r) - 2 r (1 - r^n) / (n (1 - r)^2)) / n of the drift's variance.
    const auto over = [&](double n) {
      const double left = (9 - 40 * (1 - std::pow(0.8, n)) / n) / n;
      return std::sqrt(lasting_cv * lasting_cv + (0.25 - lasting_cv * lasting_cv) * left);
    };
    const CostsRequest request{.steps = 60,
                               .layers = 200,
                               .cv = 0.5,
                               .lasting_cv = over(60),
                               .drift_may_leave_more = true,
                               .autocorrelation = 0.8};
    const CostsRequest longer = resized(request, 600, 200);
    EXPECT_NEAR(*longer.lasting_cv, over(600), 1e-9) << lasting_cv;
    EXPECT_NEAR(*resized(longer, 60, 200).lasting_cv, *request.lasting_cv, 1e-9) << lasting_cv;
    const auto features = features_of_costs(longer);
    ASSERT_TRUE(features) << features.error().message;
    EXPECT_NEAR(features->fibers[0].values->all.cv, over(600), 0.02) << lasting_cv;
    EXPECT_NEAR(features->values->all.cv, 0.5, 0.02 * 0.5) << lasting_cv;
  }
}

TEST(GenerateCosts, NamesWhatIsOutOfRange) {
  const auto fault = [](const CostsRequest& request) {
    const auto features = features_of_costs(request);
    return features ? "" : features.error().message;
  };
  EXPECT_EQ(fault({.steps = 10, .layers = 1}), "the number of layers is 1, wanted 2 to 65536");
  EXPECT_EQ(fault({.steps = 10, .layers = 4, .step_s = 0}),
            "the seconds of a step are 0, wanted above 0 to 1e6");
  const std::string cv = fault({.steps = 100, .layers = 4, .cv = 3});
  EXPECT_NE(cv.find("contradicts 4 layers"), std::string::npos) << cv;
}

}  // namespace
}  // namespace dynmo::tensor
