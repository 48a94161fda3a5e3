// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products with a pruned matrix W [O, I] of which only the kept weights are stored: their places in
// a Pattern, which all micro-batches and updates share until the next pruning, their values in a
// vector of their own, so that AdamW, norms and reductions see one parameter as any other.
//
// Activations are plain row-major matrices of N tokens on the CPU, fp32 or fp64. One thread sums
// each element of a result, in an order that depends on the pattern and on N alone: results have
// the same bits with any number of threads.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dynmo/core/units.h"
#include "dynmo/kernels/sparse_kernels.h"

namespace dynmo::kernels::sparse {

// Where the weights of a group of kGroup rows in a block of kBlock columns begin.
struct Cell {
  std::int32_t segment;
  std::int32_t weight;
};

// The kept places of a matrix, cell by cell, the blocks of the first group first. In a cell, rows
// with more weights come first; in a row, columns ascend.
struct Index {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::vector<Cell> cells;  // and one more, their end
  std::vector<Segment> segments;
  std::vector<std::uint8_t> column;  // of each weight, in its block
  std::vector<std::int32_t> place;   // of each weight, among the values
};

// Immutable once made. Threads may share it.
struct Pattern {
  Index by_row;     // of W
  Index by_column;  // of W^T

  [[nodiscard]] std::int64_t rows() const { return by_row.rows; }
  [[nodiscard]] std::int64_t columns() const { return by_row.columns; }
  [[nodiscard]] std::int64_t kept() const { return static_cast<std::int64_t>(by_row.place.size()); }
  // Counts them as cost/product_fit.h says.
  [[nodiscard]] std::int64_t segments() const {
    return static_cast<std::int64_t>(by_row.segments.size() + by_column.segments.size());
  }
  [[nodiscard]] double density() const;                     // 1 of a matrix without elements
  [[nodiscard]] std::vector<std::int64_t> offsets() const;  // what it was made from
  [[nodiscard]] Bytes bytes() const;
};

// From the offsets o * columns + i of the kept weights, ascending; fewer than 2^31 of them.
[[nodiscard]] std::shared_ptr<const Pattern> make_pattern(std::int64_t rows, std::int64_t columns,
                                                          std::span<const std::int32_t> offsets);
// From a mask [O, I]: what is not zero is kept.
[[nodiscard]] std::shared_ptr<const Pattern> make_pattern(const at::Tensor& mask_OI);

// Below, `values` has kept() elements of the type of the activations, in the order of the offsets;
// `set` is for tests and benchmarks.

// x W^T.
[[nodiscard]] at::Tensor times(const Pattern& pattern, const at::Tensor& values,
                               const at::Tensor& x_NI, InstructionSet set = instruction_set());
// y W.
[[nodiscard]] at::Tensor times_transposed(const Pattern& pattern, const at::Tensor& values,
                                          const at::Tensor& y_NO,
                                          InstructionSet set = instruction_set());
// sum += y W, in place. Rows of the sum are contiguous.
void add_times_transposed(at::Tensor& sum_NI, const Pattern& pattern, const at::Tensor& values,
                          const at::Tensor& y_NO, InstructionSet set = instruction_set());
// gradient[k] += sum_N(dy[n, o] * x[n, i]) for the place (o, i) of each kept weight k.
void add_product(const Pattern& pattern, at::Tensor& gradient, const at::Tensor& dy_NO,
                 const at::Tensor& x_NI, InstructionSet set = instruction_set());

}  // namespace dynmo::kernels::sparse
