// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of rows in groups, each with the matrix of its group, for devices. The host does not
// know how many rows a group has, so nothing waits for the device. They run on any device, so tests
// run them on the CPU.
//
// Rows are sorted by group. Rows behind the last group may follow. Their results are unspecified,
// and those of other rows do not depend on them.
//
// Dimensions: G groups, R rows, I inputs, O outputs of a matrix; Q blocks of C places, P = Q C.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

namespace dynmo::kernels {

// The form of a product.
enum class GroupForm {
  // One kernel of libtorch, at::_grouped_mm, which reads on the device where groups end.
  kOperator,
  // Copies the rows of each group into blocks of equal size. Then at::bmm multiplies each block
  // with a copy of its group's matrix. The host takes the largest number of blocks that R rows can
  // need. That is at most 3 G: a block has about R / (2 G) rows, and each group rounds up once.
  kBlocks,
};

// Returns the form for rows like x and matrices of these widths.
//
// at::_grouped_mm is one kernel for bf16 on CUDA devices of capability 9 and 10 alone, with widths
// that are multiples of 8. Otherwise libtorch 2.11 reads the groups' ends on the host, a wait for
// each product, so kBlocks takes its place.
[[nodiscard]] GroupForm group_form(const at::Tensor& x, std::initializer_list<std::int64_t> widths);

struct RowGroups {
  GroupForm form = GroupForm::kBlocks;
  std::int64_t count = 0;  // G
  std::int64_t block = 0;  // C
  at::Tensor ends_G = {};  // int32. Only kOperator has it and the next.
  at::Tensor empty_G11 = {};
  at::Tensor group_of_Q = {};  // int64
  at::Tensor rows_P = {};      // int64, the row at each place; any row in padding
  at::Tensor padding_P1 = {};  // whether the place is padding
  at::Tensor places_R = {};    // int64, the place of each row
  [[nodiscard]] std::vector<at::Tensor> tensors() const;
};

// Returns the groups of `rows` rows. Group g has the rows starts[g] to starts[g + 1] - 1. `starts`
// is int64, [G + 1], on the device. Requires rows > 0.
[[nodiscard]] RowGroups group_rows(const at::Tensor& starts, std::int64_t rows, GroupForm form);

// Returns x W^T for each row and its group's W.
[[nodiscard]] at::Tensor grouped_times(const RowGroups& groups, const at::Tensor& x_RI,
                                       const at::Tensor& w_GOI);
// Returns y W.
[[nodiscard]] at::Tensor grouped_times_transposed(const RowGroups& groups, const at::Tensor& y_RO,
                                                  const at::Tensor& w_GOI);
// Returns dy^T x of each group, GOI. It is 0 for a group without rows.
//
// Sums of bf16 are rounded to bf16 once, or with kBlocks once a block, and are then fp32.
[[nodiscard]] at::Tensor grouped_gradient(const RowGroups& groups, const at::Tensor& dy_RO,
                                          const at::Tensor& x_RI);

}  // namespace dynmo::kernels
