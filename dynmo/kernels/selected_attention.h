// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention on chosen rows of queries and keys, so that its time is proportional to their pairs. A
// device takes only the forms of generic_selection.h.
//
// Dimensions as in operations.h, G key heads.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "dynmo/kernels/operations.h"
#include "dynmo/kernels/ragged_attention.h"

namespace dynmo::kernels {

// Rows of x_BTHK in sections, int64. Row (b T + t) H + h is head h of token t. The heads are those
// of the queries, also for keys. A section has rows of one head of one sequence, and no row is in
// two sections. Sections are ordered by sequence, then by head. Within a section tokens ascend.
struct Selection {
  at::Tensor queries;
  at::Tensor query_offsets;
  at::Tensor keys;
  at::Tensor key_offsets;
  Mask mask = Mask::kCausal;

  // Forms of a device, in place of these four tensors. Each of N = B H heads has S sections. All
  // rows are chosen, as queries and as keys. The mask is kStrict.
  at::Tensor pairs = {};  // int64, of all sections

  // The padded form. L is the length of the longest section.
  at::Tensor rows_NLS = {};  // int64, the row at each place; -1: none, behind those of its section
  at::Tensor places = {};    // int64, the place of each row in the flat rows_NLS
  [[nodiscard]] bool padded() const { return rows_NLS.defined(); }

  // The packed form, of M = B T H rows. A section of n rows has n - 1 places. Each has a key, the
  // row of that rank, and a query, the row behind it. So plain causal attention is the mask.
  // Places behind those of all sections have any rows. First are those of keys, then of queries.
  at::Tensor packed_rows_2M = {};    // int64, the row at each place
  at::Tensor packed_places_2M = {};  // int64, the place of each row; -1: none
  at::Tensor packed_offsets = {};    // int32, [N S + 1], where sections begin
  [[nodiscard]] bool packed() const { return packed_offsets.defined(); }

  [[nodiscard]] std::vector<at::Tensor> tensors() const;
};

// Added to the square of a query's norm if the query with norm 1 is a key, so that 0 stays 0.
constexpr double kLeastSquare = 1e-12;

// Returns the number of pairs (query, key) of all heads and sequences in the selection. Waits for
// the device if the selection has a form of a device.
[[nodiscard]] std::int64_t pairs_of(const at::Tensor& q_BTHK, const Selection& selection);

// Like causal_attention() and its gradient, on the selection. Queries that are not chosen, or see
// no key, give 0.
//
// If k is undefined, the queries with norm 1 serve as keys. Their gradient is then part of q's, and
// k's is undefined.
[[nodiscard]] Attention selected_attention(const at::Tensor& q_BTHK, const at::Tensor& k_BTGK,
                                           const at::Tensor& v_BTGK, const Selection& selection);
[[nodiscard]] AttentionGradient selected_attention_gradient(
    const at::Tensor& gradient_BTHK, const at::Tensor& q_BTHK, const at::Tensor& k_BTGK,
    const at::Tensor& v_BTGK, const Attention& attention, const Selection& selection);

}  // namespace dynmo::kernels
