// SPDX-License-Identifier: Apache-2.0
#include "dynmo/tensor/features.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "dynmo/core/rng.h"

namespace dynmo::tensor {
namespace {

SparseTensor random_tensor(Rng& rng, int order, std::uint64_t max_size, bool valued) {
  SparseTensor tensor;
  double places = 1;
  for (int mode = 0; mode < order; ++mode) {
    tensor.sizes.push_back(1 + rng.below(max_size));
    places *= static_cast<double>(tensor.sizes.back());
  }
  tensor.indices.resize(tensor.sizes.size());
  std::set<std::vector<std::uint32_t>> all;
  const std::uint64_t entries = 1 + rng.below(static_cast<std::uint64_t>(std::min(places, 400.0)));
  for (std::uint64_t i = 0; i < entries; ++i) {
    std::vector<std::uint32_t> place;
    // (The square makes low indices more frequent.)
    for (const std::uint64_t size : tensor.sizes) {
      const double u = rng.uniform();
      place.push_back(static_cast<std::uint32_t>(u * u * static_cast<double>(size)));
    }
    all.insert(place);
  }
  std::vector<std::vector<std::uint32_t>> places_of(all.begin(), all.end());
  for (std::size_t i = places_of.size(); i > 1; --i)
    std::swap(places_of[i - 1], places_of[rng.below(i)]);
  for (const std::vector<std::uint32_t>& place : places_of) {
    for (std::size_t m = 0; m < place.size(); ++m) tensor.indices[m].push_back(place[m]);
    if (valued) tensor.values.push_back(rng.uniform() * 10);
  }
  return tensor;
}

// All groups, the empty ones too, one after another.
struct Group {
  double entries = 0;
  std::set<std::vector<std::uint32_t>> fibers = {};
  double values = 0;
};
std::vector<Group> brute_force(const SparseTensor& tensor, const std::vector<int>& free) {
  std::vector<std::size_t> fixed;
  std::size_t groups = 1;
  for (std::size_t m = 0; m < tensor.sizes.size(); ++m) {
    if (std::ranges::find(free, static_cast<int>(m)) != free.end()) continue;
    fixed.push_back(m);
    groups *= tensor.sizes[m];
  }
  std::vector<Group> all(groups);
  for (std::size_t i = 0; i < tensor.entries(); ++i) {
    std::size_t group = 0;
    for (const std::size_t m : fixed) group = group * tensor.sizes[m] + tensor.indices[m][i];
    all[group].entries += 1;
    std::vector<std::uint32_t> fiber;  // the place without the last free mode
    for (std::size_t m = 0; m < tensor.sizes.size(); ++m) {
      if (static_cast<int>(m) != free.back()) fiber.push_back(tensor.indices[m][i]);
    }
    all[group].fibers.insert(fiber);
    if (!tensor.values.empty()) all[group].values += tensor.values[i];
  }
  return all;
}

void expect_near(double got, double wanted, const std::string& what) {
  EXPECT_NEAR(got, wanted, 1e-12 * std::max(1.0, std::abs(wanted))) << what;
}

void expect_spread(const Spread& got, const std::vector<double>& numbers, double tolerance,
                   const std::string& what) {
  double mean = 0;
  for (const double number : numbers) mean += number;
  mean /= static_cast<double>(numbers.size());
  double variance = 0;
  for (const double number : numbers) variance += (number - mean) * (number - mean);
  const double std = std::sqrt(variance / static_cast<double>(numbers.size()));
  EXPECT_NEAR(got.min, std::ranges::min(numbers), tolerance) << what;
  expect_near(got.mean, mean, what);
  EXPECT_NEAR(got.std, std, 1e-9 * std::max(1.0, mean)) << what;
  EXPECT_NEAR(got.cv, std / mean, 1e-9) << what;
  expect_near(got.imbalance, std::ranges::max(numbers) / mean - 1, what);
}

void expect_distribution(const Distribution& got, const std::vector<Group>& groups,
                         double (*number)(const Group&), double tolerance,
                         const std::string& what) {
  std::vector<double> all;
  std::vector<double> nonempty;
  double sum = 0;
  for (const Group& group : groups) {
    all.push_back(number(group));
    if (group.entries > 0) nonempty.push_back(all.back());
    sum += all.back();
  }
  EXPECT_EQ(got.groups, static_cast<double>(groups.size())) << what;
  EXPECT_EQ(got.nonempty, nonempty.size()) << what;
  EXPECT_NEAR(got.sum, sum, tolerance) << what;
  EXPECT_NEAR(got.max, std::ranges::max(all), tolerance) << what;
  expect_spread(got.all, all, tolerance, what + " over all");
  expect_spread(got.of_nonempty, nonempty, tolerance, what + " over nonempty ones");
}

void expect_groups(const SparseTensor& tensor, const GroupFeatures& features,
                   const std::string& what) {
  const std::vector<Group> groups = brute_force(tensor, features.free);
  expect_distribution(
      features.entries, groups, [](const Group& g) { return g.entries; }, 0, what + " entries");
  if (features.fibers) {
    expect_distribution(
        *features.fibers, groups,
        [](const Group& g) { return static_cast<double>(g.fibers.size()); }, 0, what + " fibers");
  }
  ASSERT_EQ(features.values.has_value(), !tensor.values.empty()) << what;
  if (features.values) {
    expect_distribution(
        *features.values, groups, [](const Group& g) { return g.values; }, 1e-9, what + " values");
  }
}

TEST(Features, AreThoseOfBruteForceInAnyOrder) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({seed, 7}));
    const int order = 1 + static_cast<int>(rng.below(5));
    const SparseTensor tensor = random_tensor(rng, order, order > 3 ? 7 : 12, rng.below(2) == 1);
    const auto features = features_of(tensor);
    ASSERT_TRUE(features) << "seed " << seed << ": " << features.error().message;
    ASSERT_EQ(features->fibers.size(), tensor.sizes.size()) << "seed " << seed;
    ASSERT_EQ(features->slices.size(), tensor.sizes.size() * (tensor.sizes.size() - 1) / 2)
        << "seed " << seed;
    EXPECT_EQ(features->modes.size(), order >= 4 ? tensor.sizes.size() : 0) << "seed " << seed;
    for (const auto* list : {&features->fibers, &features->slices, &features->modes}) {
      for (const GroupFeatures& group : *list) {
        std::string what = "seed " + std::to_string(seed) + ", free";
        for (const int mode : group.free) what += " " + std::to_string(mode);
        expect_groups(tensor, group, what);
      }
    }
    for (const GroupFeatures& slice : features->slices) EXPECT_TRUE(slice.fibers.has_value());
  }
}

TEST(Features, AreTheSameWithAnyNumberOfThreads) {
  Rng rng(3);
  for (int i = 0; i < 10; ++i) {
    const SparseTensor tensor = random_tensor(rng, 4, 9, i % 2 == 1);
    const Json one = to_json(*features_of(tensor, {.threads = 1}));
    EXPECT_EQ(one, to_json(*features_of(tensor, {.threads = 2})));
    EXPECT_EQ(one, to_json(*features_of(tensor, {.threads = 5})));
  }
}

TEST(Features, OfWideIndicesAreThoseOfTheSameTensorInASmallerSpace) {
  Rng rng(11);
  const SparseTensor small = random_tensor(rng, 4, 9, false);
  SparseTensor wide = small;
  for (std::uint64_t& size : wide.sizes) size = std::uint64_t{1} << 30;
  const auto a = features_of(small);
  const auto b = features_of(wide);
  ASSERT_TRUE(a && b);
  for (std::size_t i = 0; i < a->slices.size(); ++i) {
    EXPECT_EQ(a->slices[i].entries.of_nonempty.std, b->slices[i].entries.of_nonempty.std);
    EXPECT_EQ(a->slices[i].fibers->max, b->slices[i].fibers->max);
  }
}

TEST(Features, RefuseIndicesOfMoreThan127Bits) {
  SparseTensor tensor{.sizes = std::vector<std::uint64_t>(5, kMaxSize), .indices = {}};
  tensor.indices.assign(5, {0});
  const auto features = features_of(tensor);
  ASSERT_FALSE(features);
  EXPECT_EQ(features.error().message,
            "the indices of the 5 modes take 160 bits together, wanted at most 127");
}

TEST(Features, ReadBackAsTheyWereWritten) {
  Rng rng(5);
  for (int i = 0; i < 20; ++i) {
    SparseTensor tensor = random_tensor(rng, 2 + i % 4, 6, i % 2 == 1);
    if (i % 3 == 0) tensor.names.assign(tensor.sizes.size(), "mode");
    const Json json = to_json(*features_of(tensor, {.along = 0}));
    const auto read = parse_features(json, "f.json");
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(to_json(*read), json);
  }
}

TEST(Features, OfAFileOfSomethingElseAreRefused) {
  const auto plan = parse_features(Json{{"format", "dynmo-plan-1"}}, "plan.json");
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code, ErrorCode::kBadInput);
  EXPECT_NE(plan.error().message.find("plan.json"), std::string::npos) << plan.error().message;
}

// Series x(t) = r x(t - 1) + noise.
SparseTensor autoregressive(double r, std::uint64_t seed, std::uint32_t steps) {
  SparseTensor tensor{.sizes = {steps, 64}, .indices = {{}, {}}};
  for (std::uint32_t series = 0; series < 64; ++series) {
    Rng rng(mix_key({seed, series}));
    double x = rng.normal();
    for (std::uint32_t t = 0; t < steps; ++t) {
      tensor.indices[0].push_back(t);
      tensor.indices[1].push_back(series);
      tensor.values.push_back(x + 10);
      x = r * x + std::sqrt(1 - r * r) * rng.normal();
    }
  }
  return tensor;
}

TEST(Persistence, FindsTheAutocorrelationAndHalfLifeOfASeries) {
  for (const double r : {0.0, 0.5, 0.9, 0.98}) {
    const auto features = features_of(autoregressive(r, 1, 2000), {.along = 0});
    ASSERT_TRUE(features && features->along);
    EXPECT_NEAR(features->along->autocorrelation, r, 0.01) << r;
    ASSERT_TRUE(features->along->half_life) << r;
    if (r >= 0.9) {
      EXPECT_NEAR(static_cast<double>(*features->along->half_life), std::log(0.5) / std::log(r),
                  0.15 * std::log(0.5) / std::log(r) + 1)
          << r;
    } else {
      EXPECT_LE(*features->along->half_life, 2) << r;
    }
  }
}

TEST(Persistence, OfALoadThatNeverChangesIsNoHalfLife) {
  SparseTensor tensor{.sizes = {10, 2}, .indices = {{}, {}}};
  for (std::uint32_t t = 0; t < 10; ++t) {
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      tensor.indices[0].push_back(t);
      tensor.indices[1].push_back(layer);
      tensor.values.push_back(0.1 * (layer + 1));
    }
  }
  const auto features = features_of(tensor, {.along = 0});
  ASSERT_TRUE(features && features->along);
  EXPECT_EQ(features->along->autocorrelation, 0);
  EXPECT_FALSE(features->along->half_life);
}

}  // namespace
}  // namespace dynmo::tensor
