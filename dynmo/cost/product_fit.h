// SPDX-License-Identifier: Apache-2.0
#pragma once

// The time of the products with a compressed matrix, of which only the kept weights are stored,
// relative to the time of the dense products: a part that does not depend on what is left
// (activations are transposed, results stored), a part for each weight, and a part for each segment
// of weights, whose sums are loaded and stored once.
//
// A *segment* is a row of the matrix inside a block of kSegment columns, or a column inside a block
// of kSegment rows, where at least one weight is left. The loops of kernels/sparse_kernels.h take
// one at a time: rows for the product and the gradient of the weights, columns for the gradient of
// the input. A matrix whose weights lie together has fewer segments than one of equal density whose
// weights are spread evenly.

#include <cstdint>
#include <span>

namespace dynmo::cost {

inline constexpr std::int64_t kSegment = 128;  // columns, or rows, of a block

// A matrix has these shares left of all its weights and of all segments that it could have.
struct Occupancy {
  double weights = 1;
  double segments = 1;
  friend bool operator==(const Occupancy&, const Occupancy&) = default;
};

// All segments of a matrix without a zero.
[[nodiscard]] std::int64_t all_segments(std::int64_t rows, std::int64_t columns);
// Counted: so many weights and segments of a matrix. 1 of a matrix without elements.
[[nodiscard]] Occupancy occupancy(std::int64_t weights, std::int64_t segments, std::int64_t rows,
                                  std::int64_t columns);
// Expected, where each weight is kept with probability `density`: a segment of n places has one
// with probability 1 - (1 - density)^n.
[[nodiscard]] Occupancy even_occupancy(double density, std::int64_t rows, std::int64_t columns);

// The defaults follow from the ratios in bench/results/2026-11-22-sparse-products.md: 5.1 times as
// fast as dense with 5 % of the weights, 2.0 times with 20 %, as fast with 45 %. A training
// measures its own (kernels/sparse_break_even.h).
struct ProductFit {
  double fixed = 0.07;
  double weights = 2;       // of a matrix that has all
  double segments = 0.025;  // the same
  friend bool operator==(const ProductFit&, const ProductFit&) = default;

  [[nodiscard]] double time(const Occupancy& left) const {
    return fixed + weights * left.weights + segments * left.segments;
  }
};

struct ProductPoint {
  Occupancy left;
  double time = 1;  // relative to dense; above 0
};

// The coefficients, none below 0, with the least sum of squares of relative errors. What the points
// cannot tell apart (all have the same share of segments) is in the coefficient further to the
// front. The same bits from the same points. Requires a point.
[[nodiscard]] ProductFit fit_products(std::span<const ProductPoint> points);

}  // namespace dynmo::cost
