// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/product_fit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"

namespace dynmo::cost {
namespace {

std::vector<ProductPoint> points_of(const ProductFit& truth, Rng& rng, int count) {
  std::vector<ProductPoint> points;
  for (int i = 0; i < count; ++i) {
    const Occupancy left{.weights = 0.05 + 0.5 * rng.uniform(),
                         .segments = 0.2 + 0.8 * rng.uniform()};
    points.push_back({.left = left, .time = truth.time(left)});
  }
  return points;
}

TEST(ProductFit, FindsTheCoefficientsOfPointsWithoutErrors) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Rng rng(mix_key({0x5046, seed}));
    // Some of them are 0.
    const auto coefficient = [&](double scale) {
      return rng.below(4) == 0 ? 0 : scale * (0.05 + rng.uniform());
    };
    const ProductFit truth{.fixed = 0.01 + 0.2 * rng.uniform(),
                           .weights = coefficient(3),
                           .segments = coefficient(0.3)};
    const ProductFit found = fit_products(points_of(truth, rng, 6));
    ASSERT_NEAR(found.fixed, truth.fixed, 1e-8) << "seed " << seed;
    ASSERT_NEAR(found.weights, truth.weights, 1e-8) << "seed " << seed;
    ASSERT_NEAR(found.segments, truth.segments, 1e-8) << "seed " << seed;
  }
}

double squares(const ProductFit& fit, const std::vector<ProductPoint>& points) {
  double sum = 0;
  for (const ProductPoint& point : points) {
    const double error = fit.time(point.left) / point.time - 1;
    sum += error * error;
  }
  return sum;
}

// No coefficients on a grid around it, none of them below 0, are nearer to points with errors.
TEST(ProductFit, IsTheNearestWithoutNegativeCoefficients) {
  int at_zero = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng(mix_key({0x5047, seed}));
    std::vector<ProductPoint> points =
        points_of({.fixed = 0.05, .weights = 1.5, .segments = 0.03}, rng, 6);
    for (ProductPoint& point : points) point.time *= std::exp(0.2 * rng.normal());
    const ProductFit found = fit_products(points);
    ASSERT_GE(std::min({found.fixed, found.weights, found.segments}), 0) << "seed " << seed;
    at_zero += found.fixed == 0 || found.segments == 0 ? 1 : 0;
    for (int i = 0; i < 200; ++i) {
      const auto moved = [&](double x) { return std::max(0.0, x + 0.05 * rng.normal()); };
      const ProductFit other{.fixed = moved(found.fixed),
                             .weights = moved(found.weights),
                             .segments = moved(found.segments)};
      ASSERT_GE(squares(other, points), squares(found, points) * (1 - 1e-9)) << "seed " << seed;
    }
  }
  EXPECT_GT(at_zero, 20) << "limits that hold";
}

// Only the sum of two coefficients follows from points that all have every segment.
TEST(ProductFit, PutsInFrontWhatThePointsDoNotTellApart) {
  const ProductFit truth{.fixed = 0.05, .weights = 2, .segments = 0.03};
  std::vector<ProductPoint> points;
  for (const double density : {0.1, 0.25, 0.4}) {
    const Occupancy left{.weights = density, .segments = 1};
    points.push_back({.left = left, .time = truth.time(left)});
  }
  ProductFit found = fit_products(points);
  EXPECT_NEAR(found.fixed, 0.08, 1e-9);
  EXPECT_NEAR(found.weights, 2, 1e-9);
  EXPECT_EQ(found.segments, 0);
  found = fit_products(std::vector<ProductPoint>(points.begin(), points.begin() + 1));
  EXPECT_NEAR(found.time(points[0].left), points[0].time, 1e-12);
  EXPECT_THROW(static_cast<void>(fit_products({})), CheckFailure);
}

// Beside masks drawn at random, weight by weight.
TEST(ProductFit, ExpectsTheSegmentsOfWeightsThatAreSpreadEvenly) {
  constexpr int kMasks = 60;
  for (const auto& [rows, columns] : {std::pair{128, 256}, {100, 300}, {257, 1}, {40, 24}}) {
    for (const double density : {0.002, 0.02, 0.2}) {
      Rng rng(mix_key({0x5048, static_cast<std::uint64_t>(rows)}));
      double counted = 0;
      for (int mask = 0; mask < kMasks; ++mask) {
        const auto height = static_cast<std::size_t>(rows);
        const auto width = static_cast<std::size_t>(columns);
        constexpr auto kPlaces = static_cast<std::size_t>(kSegment);
        std::vector<std::vector<char>> by_row(height, std::vector<char>(width / kPlaces + 1));
        std::vector<std::vector<char>> by_column(width, std::vector<char>(height / kPlaces + 1));
        for (std::size_t i = 0; i < by_row.size(); ++i) {
          for (std::size_t j = 0; j < by_column.size(); ++j) {
            if (rng.uniform() >= density) continue;
            by_row[i][j / kPlaces] = by_column[j][i / kPlaces] = 1;
          }
        }
        for (const auto* all : {&by_row, &by_column}) {
          for (const auto& line : *all) counted += static_cast<double>(std::ranges::count(line, 1));
        }
      }
      const Occupancy expected = even_occupancy(density, rows, columns);
      const auto all = static_cast<double>(all_segments(rows, columns));
      // Four standard deviations if segments were independent, and half as much again, as they
      // share weights.
      const double p = expected.segments;
      const double tolerance = 6 * std::sqrt(p * (1 - p) / (all * kMasks)) + 1e-12;
      EXPECT_NEAR(expected.segments, counted / kMasks / all, tolerance)
          << rows << " x " << columns << ", density " << density;
      EXPECT_EQ(expected.weights, density);
    }
  }
  EXPECT_EQ(all_segments(1024, 1024), 2 * 8 * 1024);
  EXPECT_EQ(all_segments(129, 1), 129 + 2);
  EXPECT_EQ(even_occupancy(1, 300, 200), Occupancy());
  EXPECT_EQ(even_occupancy(0.5, 0, 200), Occupancy());
  EXPECT_EQ(occupancy(300 * 200, all_segments(300, 200), 300, 200), Occupancy());
}

// The table of bench/results/2026-11-22-sparse-products.md, ranks of one thread: means over the
// three products. Dense ones take as long at 40 to 47 % density.
TEST(ProductFit, DefaultsAreNearTheMeasuredGains) {
  const ProductFit fit;
  const auto gain = [&](double density) {
    return 1 / fit.time(even_occupancy(density, 1024, 1024));
  };
  EXPECT_NEAR(gain(0.05), 5.12, 0.1 * 5.12);
  EXPECT_NEAR(gain(0.1), 3.37, 0.1 * 3.37);
  EXPECT_NEAR(gain(0.2), 2.19, 0.1 * 2.19);
  EXPECT_GT(gain(0.4), 1);
  EXPECT_LT(gain(0.47), 1);
}

}  // namespace
}  // namespace dynmo::cost
