// SPDX-License-Identifier: Apache-2.0
#pragma once

// Some of the tokens of each sequence. They keep their positions.
//
// Attention layers use RowsLeft if rows of a micro-batch have left (Hidden::rows). They attend
// among the rows that are still here, each at its position in its sequence. N such rows are stored
// as one sequence, 1NHK, so that layers are written once.

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/kernels/operations.h"
#include "dynmo/kernels/ragged_attention.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

// A second base of layers whose arithmetic depends on the positions of their tokens.
class TakesPositions {
 public:
  virtual ~TakesPositions() = default;
  // Like Layer::forward(), for tokens at these positions of their sequences, int64, ascending in
  // each. Its stash is one of the layer's own.
  [[nodiscard]] virtual Output forward_at(const LayerState& state, const Hidden& input,
                                          const at::Tensor& positions_BT,
                                          const LayerContext& context,
                                          std::unique_ptr<Stash>* stash) const = 0;
};

// Runs any layer. Layers without TakesPositions do not depend on positions.
[[nodiscard]] inline Output forward_at(const Layer& layer, const LayerState& state,
                                       const Hidden& input, const at::Tensor& positions_BT,
                                       const LayerContext& context, std::unique_ptr<Stash>* stash) {
  const auto* takes = dynamic_cast<const TakesPositions*>(&layer);
  return takes == nullptr ? layer.forward(state, input, context, stash)
                          : takes->forward_at(state, input, positions_BT, context, stash);
}

// The sections of an attention among the rows that are left, or null if all tokens are here.
using RowsLeft = std::shared_ptr<const kernels::Ragged>;

[[nodiscard]] inline RowsLeft rows_left(const Hidden& input, const LayerContext& context) {
  if (!input.rows.defined()) return nullptr;
  DYNMO_CHECK(context.sequences > 0 && context.sequence_length > 0,
              "the shape of a micro-batch of which rows have left");
  const auto* row = kernels::host_data<const std::int32_t>(input.rows);
  const std::int64_t N = input.rows.numel();
  kernels::RaggedRows all;
  std::int64_t sequence = 0;
  all.offsets.push_back(0);
  for (std::int64_t n = 0; n < N; ++n) {
    DYNMO_CHECK(row[n] >= 0 && row[n] < context.sequences * context.sequence_length &&
                    (n == 0 || row[n - 1] < row[n]),
                "ascending rows of {} x {} tokens, got row {}", context.sequences,
                context.sequence_length, row[n]);
    for (; row[n] >= (sequence + 1) * context.sequence_length; ++sequence) {
      all.offsets.push_back(n);
    }
    all.positions.push_back(static_cast<std::int32_t>(row[n] % context.sequence_length));
  }
  while (std::ssize(all.offsets) <= context.sequences) all.offsets.push_back(N);
  return std::make_shared<const kernels::Ragged>(
      kernels::Ragged{.queries = all, .keys = all, .mask = kernels::Mask::kCausal});
}

// Returns the positions of the rows in their sequences, as apply_rope() takes them.
[[nodiscard]] inline at::Tensor positions_of(const RowsLeft& left) {
  const std::vector<std::int32_t>& positions = left->queries.positions;
  at::Tensor positions_1N = at::empty({1, std::ssize(positions)}, at::kLong);
  std::ranges::copy(positions, kernels::host_data<std::int64_t>(positions_1N));
  return positions_1N;
}

[[nodiscard]] inline kernels::Attention attention_of_left(const at::Tensor& q_BTHK,
                                                          const at::Tensor& k_BTHK,
                                                          const at::Tensor& v_BTHK,
                                                          const RowsLeft& left) {
  const kernels::RaggedAttention attention =
      kernels::ragged_attention(q_BTHK.squeeze(0), k_BTHK.squeeze(0), v_BTHK.squeeze(0), *left);
  return {.out_BTHK = attention.out_NHK.unsqueeze(0), .log_sum_exp = attention.log_sum_exp};
}

[[nodiscard]] inline kernels::AttentionGradient attention_of_left_gradient(
    const at::Tensor& gradient_BTHK, const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
    const at::Tensor& v_BTHK, const kernels::Attention& attention, const RowsLeft& left) {
  const kernels::RaggedGradient gradient = kernels::ragged_attention_gradient(
      gradient_BTHK.squeeze(0), q_BTHK.squeeze(0), k_BTHK.squeeze(0), v_BTHK.squeeze(0),
      {.out_NHK = attention.out_BTHK.squeeze(0), .log_sum_exp = attention.log_sum_exp}, *left);
  return {.q_BTHK = gradient.q_NHK.unsqueeze(0),
          .k_BTHK = gradient.k_MGK.unsqueeze(0),
          .v_BTHK = gradient.v_MGK.unsqueeze(0)};
}

}  // namespace dynmo::model
