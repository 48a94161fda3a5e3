// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/product_fit.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"

namespace dynmo::cost {
namespace {

constexpr std::size_t kTerms = 3;
using Terms = std::array<double, kTerms>;

// Returns the number of blocks. One that the edge of the matrix cuts off counts, too.
std::int64_t blocks(std::int64_t size) { return (size + kSegment - 1) / kSegment; }

// Returns the expected number of segments of a row with `places` places.
double expected_segments(double density, std::int64_t places) {
  const auto occupied = [&](std::int64_t n) {
    return 1 - std::pow(1 - density, static_cast<double>(n));
  };
  const std::int64_t whole = places / kSegment;
  return static_cast<double>(whole) * occupied(kSegment) + occupied(places % kSegment);
}

// Returns the terms of a point. Their sum, weighted by the coefficients, is 1 if the fit is exact.
Terms relative(const ProductPoint& point) {
  return {1 / point.time, point.left.weights / point.time, point.left.segments / point.time};
}

// Solves least squares by the normal equations, with the terms of `used` only. Returns nullopt if
// the points do not determine them.
std::optional<Terms> solve(const std::vector<Terms>& points, const std::array<bool, kTerms>& used) {
  std::array<std::array<double, kTerms + 1>, kTerms> rows{};
  for (std::size_t i = 0; i < kTerms; ++i) {
    for (const Terms& point : points) {
      for (std::size_t j = 0; j < kTerms; ++j) {
        rows[i][j] += used[i] && used[j] ? point[i] * point[j] : 0;
      }
      rows[i][kTerms] += used[i] ? point[i] : 0;
    }
    if (!used[i]) rows[i][i] = 1;
  }
  for (std::size_t i = 0; i < kTerms; ++i) {
    constexpr double kDistinct = 1e-9;  // share of a term that those before it do not explain
    double all = 0;
    for (const Terms& point : points) all += point[i] * point[i];
    if (used[i] && rows[i][i] <= kDistinct * all) return std::nullopt;
    for (std::size_t k = 0; k < kTerms; ++k) {
      if (k == i) continue;
      const double factor = rows[k][i] / rows[i][i];
      for (std::size_t j = i; j <= kTerms; ++j) rows[k][j] -= factor * rows[i][j];
    }
  }
  Terms found{};
  for (std::size_t i = 0; i < kTerms; ++i) found[i] = rows[i][kTerms] / rows[i][i];
  return found;
}

}  // namespace

std::int64_t all_segments(std::int64_t rows, std::int64_t columns) {
  return rows * blocks(columns) + columns * blocks(rows);
}

Occupancy occupancy(std::int64_t weights, std::int64_t segments, std::int64_t rows,
                    std::int64_t columns) {
  const auto share = [](std::int64_t part, std::int64_t all) {
    return all > 0 ? static_cast<double>(part) / static_cast<double>(all) : 1;
  };
  return {.weights = share(weights, rows * columns),
          .segments = share(segments, all_segments(rows, columns))};
}

Occupancy even_occupancy(double density, std::int64_t rows, std::int64_t columns) {
  const auto all = static_cast<double>(all_segments(rows, columns));
  if (all == 0) return {};
  const double segments = static_cast<double>(rows) * expected_segments(density, columns) +
                          static_cast<double>(columns) * expected_segments(density, rows);
  return {.weights = density, .segments = segments / all};
}

// The optimum with non-negative coefficients is a least-squares solution with some of the terms
// left out. So all seven choices are tried.
ProductFit fit_products(std::span<const ProductPoint> points) {
  DYNMO_CHECK(!points.empty(), "points to fit, got {}", points.size());
  std::vector<Terms> terms;
  for (const ProductPoint& point : points) {
    DYNMO_CHECK(point.time > 0, "times above 0, got {}", point.time);
    terms.push_back(relative(point));
  }
  constexpr double kRounding = 1e-20;  // so that among equal fits the first one stays
  ProductFit best;
  double least = std::numeric_limits<double>::infinity();
  for (unsigned choice = 1; choice < 1U << kTerms; ++choice) {
    const auto found = solve(terms, {(choice & 1U) != 0, (choice & 2U) != 0, (choice & 4U) != 0});
    if (!found || std::ranges::any_of(*found, [](double x) { return x < 0; })) continue;
    double squares = 0;
    for (const Terms& term : terms) {
      double sum = 0;
      for (std::size_t i = 0; i < kTerms; ++i) sum += (*found)[i] * term[i];
      squares += (sum - 1) * (sum - 1);
    }
    if (squares + kRounding >= least) continue;
    least = squares;
    best = {.fixed = (*found)[0], .weights = (*found)[1], .segments = (*found)[2]};
  }
  return best;
}

}  // namespace dynmo::cost
