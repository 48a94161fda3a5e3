// SPDX-License-Identifier: Apache-2.0
#include "dynmo/tensor/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
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
  for (const double cv : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    Features features = good;
    features.fibers.back().entries.of_nonempty.cv = cv;
    const auto text = text_of(request_like(features).value());
    ASSERT_FALSE(text) << cv;
    EXPECT_NE(text.error().message.find("coefficient of variation"), std::string::npos) << cv;
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

}  // namespace
}  // namespace dynmo::tensor
