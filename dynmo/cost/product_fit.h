// SPDX-License-Identifier: Apache-2.0
#pragma once

// The time of the products with a compressed matrix, which stores only the kept weights, relative
// to dense products. It has three parts. The fixed part does not depend on the kept weights:
// activations are transposed, results stored. The others are a part for each weight, and one for
// each segment, whose sums are loaded and stored once.
//
// A *segment* is a row of the matrix inside a block of kSegment columns, or a column inside a block
// of kSegment rows. It counts if it has at least one weight left. The loops of
// kernels/sparse_kernels.h take one at a time. The product and the gradient of the weights use
// rows, and the gradient of the input uses columns. A matrix with clustered weights has fewer
// segments than one of the same density with evenly spread weights.

#include <cstdint>
#include <span>

namespace dynmo::cost {

inline constexpr std::int64_t kSegment = 128;  // columns, or rows, of a block

// The shares left of all weights of a matrix, and of all segments that it could have.
struct Occupancy {
  double weights = 1;
  double segments = 1;
  friend bool operator==(const Occupancy&, const Occupancy&) = default;
};

// Returns the number of segments of a matrix that has no zero.
[[nodiscard]] std::int64_t all_segments(std::int64_t rows, std::int64_t columns);
// Returns the shares of counted weights and segments of a matrix, or 1 for a matrix without
// elements.
[[nodiscard]] Occupancy occupancy(std::int64_t weights, std::int64_t segments, std::int64_t rows,
                                  std::int64_t columns);
// Returns the expected shares if each weight is kept with probability `density`. A segment of n
// places has a weight with probability 1 - (1 - density)^n.
[[nodiscard]] Occupancy even_occupancy(double density, std::int64_t rows, std::int64_t columns);

// Coefficients of the relative time. The defaults follow from
// bench/results/2026-11-22-sparse-products.md. Measured against dense, products with 5 % of the
// weights were 5.1 times as fast. With 20 % it was 2.0 times, and with 45 % equally fast. A
// training measures its own (kernels/sparse_break_even.h).
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

// Returns the coefficients with the least sum of squares of relative errors, none below 0. If the
// points do not separate two terms (all have the same share of segments), the first of the two
// coefficients accounts for both. The same points give the same bits. Requires at least one point.
[[nodiscard]] ProductFit fit_products(std::span<const ProductPoint> points);

}  // namespace dynmo::cost
