// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products with a pruned matrix W [O, I] of which only the kept weights are stored. Their places
// are in a Pattern, which all micro-batches and updates share until the next pruning. Their values
// are in a separate vector. So AdamW, norms and reductions see it like any other parameter.
//
// Activations are plain row-major matrices of N tokens on the CPU, fp32 or fp64. One thread sums
// each element of a result, in an order that depends on the pattern and on N alone. So results have
// the same bits with any number of threads.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dynmo/core/units.h"
#include "dynmo/kernels/sparse_kernels.h"

namespace dynmo::kernels::sparse {

// The first weight of a group of kGroup rows in a block of kBlock columns.
struct Cell {
  std::int32_t segment;
  std::int32_t weight;
};

// The kept places of a matrix, cell by cell, with the blocks of the first group first. In a cell,
// rows with more weights come first. In a row, columns ascend.
struct Index {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  // The cells, and one more element, which is the end of the last.
  std::vector<Cell> cells;
  std::vector<Segment> segments;
  std::vector<std::uint8_t> column;  // by weight, in its block
  std::vector<std::int32_t> place;   // by weight: index of its value
};

// The places of a matrix's kept weights. Immutable once made, and shared by threads.
struct Pattern {
  Index by_row;     // rows of W
  Index by_column;  // rows of W^T

  [[nodiscard]] std::int64_t rows() const { return by_row.rows; }
  [[nodiscard]] std::int64_t columns() const { return by_row.columns; }
  [[nodiscard]] std::int64_t kept() const { return static_cast<std::int64_t>(by_row.place.size()); }
  // Returns the number of segments, as cost/product_fit.h counts them.
  [[nodiscard]] std::int64_t segments() const {
    return static_cast<std::int64_t>(by_row.segments.size() + by_column.segments.size());
  }
  [[nodiscard]] double density() const;                     // 1 for a matrix without elements
  [[nodiscard]] std::vector<std::int64_t> offsets() const;  // argument of make_pattern()
  [[nodiscard]] Bytes bytes() const;
};

// Makes a pattern from the offsets o * columns + i of the kept weights. Requires ascending offsets,
// fewer than 2^31 of them.
[[nodiscard]] std::shared_ptr<const Pattern> make_pattern(std::int64_t rows, std::int64_t columns,
                                                          std::span<const std::int32_t> offsets);
// Makes a pattern from a mask [O, I]. Weights whose mask is not zero are kept.
[[nodiscard]] std::shared_ptr<const Pattern> make_pattern(const at::Tensor& mask_OI);

// In the functions below, `values` has kept() elements in the order of the offsets, in the type of
// the activations. `set` is for tests and benchmarks.

// Computes x W^T.
[[nodiscard]] at::Tensor times(const Pattern& pattern, const at::Tensor& values,
                               const at::Tensor& x_NI, InstructionSet set = instruction_set());
// Computes y W.
[[nodiscard]] at::Tensor times_transposed(const Pattern& pattern, const at::Tensor& values,
                                          const at::Tensor& y_NO,
                                          InstructionSet set = instruction_set());
// Adds y W to `sum_NI`, in place. Rows of the sum are contiguous.
void add_times_transposed(at::Tensor& sum_NI, const Pattern& pattern, const at::Tensor& values,
                          const at::Tensor& y_NO, InstructionSet set = instruction_set());
// Adds sum_N(dy[n, o] * x[n, i]) to gradient[k] for the place (o, i) of each kept weight k.
void add_product(const Pattern& pattern, at::Tensor& gradient, const at::Tensor& dy_NO,
                 const at::Tensor& x_NI, InstructionSet set = instruction_set());

}  // namespace dynmo::kernels::sparse
