// SPDX-License-Identifier: Apache-2.0
#include "dynmo/tensor/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/tensor/counts_impl.h"
#include "dynmo/tensor/features.h"
#include "dynmo/tensor/shuffle_impl.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::tensor {
namespace {

Expected<std::string> text_of(const Request& request) {
  std::string text;
  DYNMO_TRY(generate(request, [&](std::string_view piece) -> Expected<void> {
    text += piece;
    return {};
  }));
  return text;
}

void expect_asked(const Request& request, const std::string& what) {
  const auto text = text_of(request);
  ASSERT_TRUE(text) << what << ": " << text.error().message;
  const auto tensor = parse_coordinates(*text, "generated.tns");
  ASSERT_TRUE(tensor) << what << ": " << tensor.error().message;
  EXPECT_EQ(tensor->sizes, request.sizes) << what;
  std::vector<std::vector<std::uint32_t>> places(tensor->entries());
  for (std::size_t i = 0; i < places.size(); ++i) {
    for (const auto& mode : tensor->indices) places[i].push_back(mode[i]);
  }
  std::ranges::sort(places);
  ASSERT_EQ(std::ranges::adjacent_find(places), places.end()) << what << ": the same place twice";
  const auto features = features_of(*tensor);
  ASSERT_TRUE(features) << what;
  const GroupFeatures& slice = features->slices.back();
  const GroupFeatures& fiber = features->fibers.back();
  EXPECT_EQ(features->entries, request.entries) << what;
  EXPECT_EQ(slice.entries.nonempty, request.slices) << what;
  EXPECT_EQ(fiber.entries.nonempty, request.fibers) << what;
  EXPECT_EQ(slice.fibers->max, static_cast<double>(request.fibers_max)) << what;
  EXPECT_EQ(fiber.entries.max, static_cast<double>(request.entries_max)) << what;
  const auto near = [&](double got, double wanted, const char* which) {
    EXPECT_NEAR(got, wanted, 0.02 * wanted + 1e-3) << what << " " << which;
  };
  near(slice.fibers->of_nonempty.cv, request.fibers_cv, "fibers");
  near(fiber.entries.of_nonempty.cv, request.entries_cv, "entries");
}

TEST(Generate, GivesWhatWasAskedExactlyAndSpreadNearly) {
  expect_asked({.sizes = {100, 200, 300},
                .slices = 90,
                .fibers = 4000,
                .entries = 60000,
                .fibers_max = 150,
                .fibers_cv = 0.5,
                .entries_max = 120,
                .entries_cv = 0.9},
               "three modes");
  expect_asked({.sizes = {40, 50},
                .slices = 1,
                .fibers = 30,
                .entries = 200,
                .fibers_max = 30,
                .fibers_cv = 0,
                .entries_max = 40,
                .entries_cv = 1.1},
               "a matrix");
  expect_asked({.sizes = {6, 7, 8, 9, 10},
                .slices = 300,
                .fibers = 900,
                .entries = 2000,
                .fibers_max = 8,
                .fibers_cv = 0.4,
                .entries_max = 9,
                .entries_cv = 0.5},
               "five modes");
  expect_asked({.sizes = {3, 4, 3, 4, 3, 4, 50, 60},
                .slices = 1000,
                .fibers = 20000,
                .entries = 100000,
                .fibers_max = 50,
                .fibers_cv = 0.3,
                .entries_max = 60,
                .entries_cv = 1.5},
               "eight modes");
  // Rare ones that are large, as in real tensors.
  expect_asked({.sizes = {2000, 2000, 100000},
                .slices = 1500,
                .fibers = 30000,
                .entries = 150000,
                .fibers_max = 1900,
                .fibers_cv = 5,
                .entries_max = 20000,
                .entries_cv = 25},
               "heavy tails");
  expect_asked({.sizes = {10, 10, 10},
                .slices = 10,
                .fibers = 100,
                .entries = 1000,
                .fibers_max = 10,
                .fibers_cv = 0,
                .entries_max = 10,
                .entries_cv = 0},
               "a dense one");
}

TEST(Shuffle, TakesEveryNumberOnceInNoOrder) {
  for (const std::uint64_t size :
       std::initializer_list<std::uint64_t>{1, 2, 3, 7, 16, 17, 1000, 99856, 100000}) {
    Shuffle shuffle(size, mix_key({size}));
    std::vector<char> seen(size, 0);
    std::uint64_t rises = 0;
    std::uint64_t last = 0;
    for (std::uint64_t i = 0; i < size; ++i) {
      const std::uint64_t image = shuffle.next();
      ASSERT_LT(image, size);
      ASSERT_FALSE(std::exchange(seen[image], 1)) << image << " comes twice of " << size;
      rises += image > last ? 1 : 0;
      last = image;
    }
    // Half of them in a random order, give or take four standard deviations.
    const auto n = static_cast<double>(size);
    if (size < 1000) continue;
    EXPECT_NEAR(static_cast<double>(rises), n / 2, 4 * std::sqrt(n / 12)) << size;
  }
}

TEST(Counts, OfFewGroupsHaveTheSpreadForAnySeed) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const CountTarget target{.groups = 300, .sum = 900, .max = 8, .cv = 0.4};
    Counts counts = Counts::make(target, seed, "entries").value();
    double sum = 0;
    double squares = 0;
    double max = 0;
    for (std::uint64_t i = 0; i < target.groups; ++i) {
      const auto count = static_cast<double>(counts.next());
      ASSERT_GE(count, 1) << "seed " << seed;
      sum += count;
      squares += count * count;
      max = std::max(max, count);
    }
    ASSERT_EQ(sum, 900) << "seed " << seed;
    ASSERT_EQ(max, 8) << "seed " << seed;
    ASSERT_NEAR(std::sqrt(squares / 300 - 9) / 3, 0.4, 0.008) << "seed " << seed;
  }
}

TEST(Generate, IsAFunctionOfTheRequest) {
  Request request{.sizes = {10, 20, 30},
                  .slices = 9,
                  .fibers = 60,
                  .entries = 300,
                  .fibers_max = 15,
                  .fibers_cv = 0.5,
                  .entries_max = 20,
                  .entries_cv = 0.8};
  const auto one = text_of(request);
  EXPECT_EQ(*one, *text_of(request));
  request.seed = 2;
  EXPECT_NE(*one, *text_of(request));
}

TEST(Generate, NamesTheRequestsThatContradictEachOther) {
  const Request good{.sizes = {10, 20, 30},
                     .slices = 9,
                     .fibers = 60,
                     .entries = 300,
                     .fibers_max = 15,
                     .fibers_cv = 0.5,
                     .entries_max = 20,
                     .entries_cv = 0.8};
  const auto fault = [](const Request& request) {
    const auto text = text_of(request);
    return text ? "" : text.error().message;
  };
  EXPECT_EQ(fault(good), "");
  Request request = good;
  request.slices = 11;
  EXPECT_EQ(fault(request),
            "11 nonempty slices contradict the sizes of the modes, which have room for 10");
  request = good;
  request.fibers_max = 6;
  EXPECT_EQ(fault(request),
            "fibers of a slice: a largest of 6 contradicts a mean of 6.66667 in 9 groups");
  request = good;
  request.entries_cv = 4;
  EXPECT_EQ(fault(request),
            "entries of a fiber: a coefficient of variation of 4 contradicts a largest of 20 with "
            "a mean of 5: wanted 0.4 to 1.531");
  request = good;
  request.entries = std::uint64_t{1} << 40;
  EXPECT_EQ(fault(request), "1099511627776 entries, wanted 1 to 8589934592");
}

TEST(Generate, LikeFeaturesOfAbsurdNumbersIsRefused) {
  const Features good = features_of(*parse_coordinates("1 1 1\n2 1 1\n2 2 1\n", "a.tns")).value();
  for (const double max : {-1e300, -1.0, 0.0, 1e300, std::nan("")}) {
    Features features = good;
    features.fibers.back().entries.max = max;
    const auto text = text_of(request_like(features).value());
    ASSERT_FALSE(text) << max;
    EXPECT_EQ(text.error().code, ErrorCode::kBadInput) << max;
  }
}

TEST(Generate, LikeFeaturesHasTheseFeatures) {
  Request request{.sizes = {30, 40, 50},
                  .slices = 25,
                  .fibers = 300,
                  .entries = 3000,
                  .fibers_max = 30,
                  .fibers_cv = 0.6,
                  .entries_max = 45,
                  .entries_cv = 0.9};
  const auto features = features_of(*parse_coordinates(*text_of(request), "a.tns"));
  auto like = request_like(*features);
  ASSERT_TRUE(like);
  like->seed = 7;
  expect_asked(*like, "like");
}

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
