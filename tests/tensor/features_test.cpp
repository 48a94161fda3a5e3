// SPDX-License-Identifier: Apache-2.0
#include "dynmo/tensor/features.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <numbers>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/tensor/sort_impl.h"

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

// Sizes decide whether entries are counted in cells or sorted, and by keys of how many bits.
TEST(Features, OfManyEntriesDoNotDependOnTheSizesOfTheModes) {
  Rng rng(12);
  SparseTensor tensor{.sizes = {60, 50, 4, 30}, .indices = {{}, {}, {}, {}}};
  for (int i = 0; i < 100000; ++i) {
    const double skewed = rng.uniform();
    for (std::size_t m = 0; m < tensor.sizes.size(); ++m) {
      const double u = m == 0 ? skewed * skewed : rng.uniform();
      const auto index = u * static_cast<double>(tensor.sizes[m]);
      tensor.indices[m].push_back(static_cast<std::uint32_t>(index));
    }
  }
  const Features small = features_of(tensor).value();
  for (const int bits : {8, 10, 16, 21, 31}) {
    SparseTensor wide = tensor;
    for (std::size_t m = 0; m < wide.sizes.size(); ++m) {
      const std::uint64_t stride = (std::uint64_t{1} << bits) / wide.sizes[m];
      wide.sizes[m] *= stride;
      for (std::uint32_t& index : wide.indices[m]) index *= static_cast<std::uint32_t>(stride);
    }
    const Features spread_out = features_of(wide).value();
    const auto same = [&](const Distribution& a, const Distribution& b, const char* what) {
      EXPECT_EQ(a.nonempty, b.nonempty) << what << ", " << bits << " bits a mode";
      EXPECT_EQ(a.sum, b.sum) << what << ", " << bits << " bits a mode";
      EXPECT_EQ(a.max, b.max) << what << ", " << bits << " bits a mode";
      EXPECT_EQ(a.of_nonempty.min, b.of_nonempty.min) << what << ", " << bits << " bits a mode";
      EXPECT_EQ(a.of_nonempty.std, b.of_nonempty.std) << what << ", " << bits << " bits a mode";
    };
    for (std::size_t i = 0; i < small.slices.size(); ++i) {
      same(small.slices[i].entries, spread_out.slices[i].entries, "entries of a slice");
      same(*small.slices[i].fibers, *spread_out.slices[i].fibers, "fibers of a slice");
    }
    for (std::size_t i = 0; i < small.fibers.size(); ++i) {
      same(small.fibers[i].entries, spread_out.fibers[i].entries, "entries of a fiber");
      same(small.modes[i].entries, spread_out.modes[i].entries, "entries of an index");
    }
  }
}

TEST(Features, CountMoreEntriesAtAPlaceThanACellHolds) {
  // 250,000 cells for 70,000 entries: there is room for cells of two bytes.
  SparseTensor tensor{.sizes = {500, 500, 2}, .indices = {{}, {}, {}}};
  for (int i = 0; i < 70000; ++i) {
    const bool elsewhere = i % 1000 == 0;
    tensor.indices[0].push_back(elsewhere ? 499 : 7);
    tensor.indices[1].push_back(elsewhere ? static_cast<std::uint32_t>(100 + i / 1000) : 8);
    tensor.indices[2].push_back(1);
  }
  const Features features = features_of(tensor).value();
  for (const GroupFeatures& fiber : features.fibers) {
    EXPECT_EQ(fiber.entries.sum, 70000) << fiber.free[0];
    EXPECT_EQ(fiber.entries.max, 69930) << fiber.free[0];
    EXPECT_EQ(fiber.entries.nonempty, fiber.free[0] == 1 ? 2 : 71) << fiber.free[0];
  }
}

template <typename Key>
void expect_sorted(Rng& rng, std::size_t size, int bits) {
  struct Element {
    Key key;
    std::uint64_t number;
  };
  std::vector<Element> elements;
  std::vector<Key> keys;
  for (std::size_t i = 0; i < size; ++i) {
    const Key high = static_cast<Key>(rng()) << (bits > 64 ? 63 : 0);
    // Every third key is among few, as in fibers of many entries.
    const auto drawn = static_cast<Key>(high ^ static_cast<Key>(rng()));
    const auto mask = static_cast<Key>((Key{1} << bits) - 1);
    keys.push_back(i % 3 == 0 ? static_cast<Key>(drawn & Key{7}) : static_cast<Key>(drawn & mask));
    elements.push_back({keys.back(), i});
  }
  sort_by_key(std::span(elements), bits);
  std::vector<Key> wanted = keys;
  std::sort(wanted.begin(), wanted.end());
  std::vector<char> seen(size, 0);
  for (std::size_t i = 0; i < size; ++i) {
    ASSERT_TRUE(elements[i].key == wanted[i]) << size << " keys of " << bits << " bits, " << i;
    ASSERT_TRUE(keys[elements[i].number] == wanted[i]) << size << " keys of " << bits << " bits";
    ASSERT_FALSE(std::exchange(seen[elements[i].number], 1)) << "an element comes twice";
  }
}

TEST(SortByKey, SortsKeysOfAnyNumberOfBits) {
  __extension__ using Wide = unsigned __int128;
  Rng rng(13);
  for (const std::size_t size :
       std::initializer_list<std::size_t>{0, 1, 2, 64, 65, 300, 32768, 32769, 100000}) {
    for (const int bits : {1, 8, 9, 31}) expect_sorted<std::uint32_t>(rng, size, bits);
    for (const int bits : {3, 33, 40, 63}) expect_sorted<std::uint64_t>(rng, size, bits);
    for (const int bits : {65, 127}) expect_sorted<Wide>(rng, size, bits);
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
  EXPECT_EQ(plan.error().message,
            "plan.json: /format is 'dynmo-plan-1', wanted 'dynmo-features-1'");
  EXPECT_FALSE(parse_features(Json::array(), "list.json"));
  EXPECT_FALSE(parse_features(Json{{"format", 1}}, "number.json"));
}

TEST(Features, AlongAModeThatTheTensorHasNotAreRefused) {
  Rng rng(6);
  Json json = to_json(*features_of(random_tensor(rng, 3, 6, true), {.along = 2}));
  ASSERT_TRUE(parse_features(json, "f.json"));
  for (const std::int64_t mode : {std::int64_t{0}, std::int64_t{4}, std::int64_t{-2147483648},
                                  std::int64_t{1} << 32, (std::int64_t{1} << 32) + 1}) {
    json["along"]["mode"] = mode;
    const auto read = parse_features(json, "f.json");
    ASSERT_FALSE(read) << mode;
    EXPECT_EQ(read.error().message,
              "f.json: /along/mode is " + std::to_string(mode) + ", wanted a mode, 1 to 3");
  }
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

// The definition, a pass for each lag.
std::optional<std::int64_t> half_life_of(const SparseTensor& tensor) {
  const std::size_t steps = tensor.sizes[0];
  const std::size_t count = tensor.sizes[1];
  std::vector<std::vector<double>> series(count, std::vector<double>(steps, 0.0));
  for (std::size_t i = 0; i < tensor.entries(); ++i) {
    series[tensor.indices[1][i]][tensor.indices[0][i]] = tensor.values[i];
  }
  for (std::size_t lag = 1; lag <= steps / 2; ++lag) {
    double lagged = 0;
    double variance = 0;
    for (const std::vector<double>& one : series) {
      double mean = 0;
      for (const double value : one) mean += value / static_cast<double>(steps);
      for (std::size_t t = 0; t < steps; ++t) {
        variance += (one[t] - mean) * (one[t] - mean);
        if (t + lag < steps) lagged += (one[t] - mean) * (one[t + lag] - mean);
      }
    }
    const double pairs = static_cast<double>(steps - lag) / static_cast<double>(steps);
    if (lagged / pairs <= 0.5 * variance) return static_cast<std::int64_t>(lag);
  }
  return std::nullopt;
}

TEST(Persistence, HasTheHalfLifeThatAPassForEachLagFinds) {
  Rng rng(8);
  int found = 0;
  for (int i = 0; i < 300; ++i) {
    const auto steps = static_cast<std::uint32_t>(2 + rng.below(90));
    const auto layers = static_cast<std::uint32_t>(1 + rng.below(5));
    const double r = 1 - 0.3 * rng.uniform() * rng.uniform();
    SparseTensor tensor{.sizes = {steps, layers}, .indices = {{}, {}}};
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      double x = rng.normal();
      for (std::uint32_t t = 0; t < steps; ++t) {
        tensor.indices[0].push_back(t);
        tensor.indices[1].push_back(layer);
        tensor.values.push_back(x);
        x = r * x + std::sqrt(1 - r * r) * rng.normal();
      }
    }
    const auto features = features_of(tensor, {.along = 0});
    ASSERT_TRUE(features && features->along) << i;
    EXPECT_EQ(features->along->half_life, half_life_of(tensor)) << i << ", " << steps << " steps";
    found += features->along->half_life.value_or(0) > 1 ? 1 : 0;
  }
  EXPECT_GT(found, 100);
}

// A pass for each of 43,418 lags would take 20 billion products.
TEST(Persistence, OfALongRecordingIsFoundToo) {
  constexpr std::uint32_t kSteps = 480000;
  constexpr double kPeriod = 240000;
  SparseTensor tensor{.sizes = {kSteps, 1}, .indices = {{}, {}}};
  for (std::uint32_t t = 0; t < kSteps; ++t) {
    tensor.indices[0].push_back(t);
    tensor.indices[1].push_back(0);
    tensor.values.push_back(2 + std::sin(2 * std::numbers::pi * t / kPeriod));
  }
  const auto features = features_of(tensor, {.along = 0});
  ASSERT_TRUE(features && features->along && features->along->half_life);
  // The integral of sin(wt) sin(w(t + lag)) over two periods less the lag, as a correlation.
  const auto lag = static_cast<double>(*features->along->half_life);
  const double angle = 2 * std::numbers::pi / kPeriod;
  const double wanted = std::cos(angle * lag) + std::sin(angle * lag) / angle / (kSteps - lag);
  EXPECT_NEAR(wanted, 0.5, 1e-4) << lag;
}

TEST(Persistence, OfALoadThatNeverChangesIsNoHalfLife) {
  for (const std::uint32_t steps : {10U, 1000000U}) {
    SparseTensor tensor{.sizes = {steps, 2}, .indices = {{}, {}}};
    for (std::uint32_t t = 0; t < steps; ++t) {
      for (std::uint32_t layer = 0; layer < 2; ++layer) {
        tensor.indices[0].push_back(t);
        tensor.indices[1].push_back(layer);
        tensor.values.push_back(0.1 * (layer + 1));
      }
    }
    const auto features = features_of(tensor, {.along = 0});
    ASSERT_TRUE(features && features->along);
    EXPECT_EQ(features->along->autocorrelation, 0) << steps;
    EXPECT_FALSE(features->along->half_life) << steps;
  }
}

}  // namespace
}  // namespace dynmo::tensor
