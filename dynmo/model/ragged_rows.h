// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention among some of the tokens of each sequence. They keep their positions.
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
  // Like Layer::forward(), for tokens at the given positions in their sequences: int64, ascending
  // in each sequence. The layer's own gradient calls accept its stash.
  [[nodiscard]] virtual Output forward_at(const LayerState& state, const Hidden& input,
                                          const at::Tensor& positions_BT,
                                          const LayerContext& context,
                                          std::unique_ptr<Stash>* stash) const = 0;
};

// Calls forward_at() of a layer with TakesPositions, else forward().
[[nodiscard]] inline Output forward_at(const Layer& layer, const LayerState& state,
                                       const Hidden& input, const at::Tensor& positions_BT,
                                       const LayerContext& context, std::unique_ptr<Stash>* stash) {
  const auto* takes = dynamic_cast<const TakesPositions*>(&layer);
  return takes == nullptr ? layer.forward(state, input, context, stash)
                          : takes->forward_at(state, input, positions_BT, context, stash);
}

// The rows of an attention layer's input that are left.
struct LeftRows {
  kernels::Ragged sections = {};  // on the CPU
  // Set on a device, int64. `places_N` are indices into [sequences, length], where each sequence's
  // rows are moved to its beginning. `positions_1N` are their positions in the sequence. The rows
  // stay in order, so plain causal attention applies. The host knows the shape without waiting for
  // the device.
  at::Tensor places_N = {};
  at::Tensor positions_1N = {};
  std::int64_t sequences = 0;
  std::int64_t length = 0;
};

// The rows that are left, or null if all tokens are here.
using RowsLeft = std::shared_ptr<const LeftRows>;

[[nodiscard]] inline RowsLeft rows_left_on_device(const at::Tensor& rows,
                                                  const LayerContext& context) {
  const at::Tensor row_N = rows.to(at::kLong);
  const at::Tensor sequence_N = row_N.div(context.sequence_length, "floor");
  const std::int64_t length = std::min(context.sequence_length, row_N.numel());
  const at::Tensor first_B =
      at::searchsorted(sequence_N, at::arange(context.sequences, row_N.options()));
  const at::Tensor places_N = at::arange(row_N.numel(), row_N.options())
                                  .sub_(first_B.index_select(0, sequence_N))
                                  .add_(sequence_N * length);
  return std::make_shared<const LeftRows>(
      LeftRows{.places_N = places_N,
               .positions_1N = row_N.remainder(context.sequence_length).unsqueeze(0),
               .sequences = context.sequences,
               .length = length});
}

[[nodiscard]] inline RowsLeft rows_left(const Hidden& input, const LayerContext& context) {
  if (!input.rows.defined()) return nullptr;
  DYNMO_CHECK(context.sequences > 0 && context.sequence_length > 0,
              "the shape of a micro-batch of which rows have left");
  if (!input.rows.is_cpu()) return rows_left_on_device(input.rows, context);
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
  return std::make_shared<const LeftRows>(
      LeftRows{.sections = {.queries = all, .keys = all, .mask = kernels::Mask::kCausal}});
}

// Returns the positions of the rows in their sequences, as apply_rope() takes them.
[[nodiscard]] inline at::Tensor positions_of(const RowsLeft& left) {
  if (left->positions_1N.defined()) return left->positions_1N;
  const std::vector<std::int32_t>& positions = left->sections.queries.positions;
  at::Tensor positions_1N = at::empty({1, std::ssize(positions)}, at::kLong);
  std::ranges::copy(positions, kernels::host_data<std::int64_t>(positions_1N));
  return positions_1N;
}

// Moves rows [1, N, H, K] to their places, and back.
[[nodiscard]] inline at::Tensor in_places(const at::Tensor& x_1NHK, const LeftRows& left) {
  at::Tensor x_MHK =
      at::zeros({left.sequences * left.length, x_1NHK.size(2), x_1NHK.size(3)}, x_1NHK.options());
  x_MHK.index_copy_(0, left.places_N, x_1NHK.squeeze(0));
  return x_MHK.view({left.sequences, left.length, x_1NHK.size(2), x_1NHK.size(3)});
}
[[nodiscard]] inline at::Tensor from_places(const at::Tensor& x_BTHK, const LeftRows& left) {
  return x_BTHK.flatten(0, 1).index_select(0, left.places_N).unsqueeze(0);
}

[[nodiscard]] inline kernels::Attention attention_of_left(const at::Tensor& q_BTHK,
                                                          const at::Tensor& k_BTHK,
                                                          const at::Tensor& v_BTHK,
                                                          const RowsLeft& left) {
  if (!q_BTHK.is_cpu()) {
    if (left->length == 0) return {.out_BTHK = at::empty_like(q_BTHK), .log_sum_exp = {}};
    kernels::Attention attention = kernels::causal_attention(
        in_places(q_BTHK, *left), in_places(k_BTHK, *left), in_places(v_BTHK, *left));
    attention.out_BTHK = from_places(attention.out_BTHK, *left);
    return attention;
  }
  const kernels::RaggedAttention attention = kernels::ragged_attention(
      q_BTHK.squeeze(0), k_BTHK.squeeze(0), v_BTHK.squeeze(0), left->sections);
  return {.out_BTHK = attention.out_NHK.unsqueeze(0), .log_sum_exp = attention.log_sum_exp};
}

[[nodiscard]] inline kernels::AttentionGradient attention_of_left_gradient(
    const at::Tensor& gradient_BTHK, const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
    const at::Tensor& v_BTHK, const kernels::Attention& attention, const RowsLeft& left) {
  if (!q_BTHK.is_cpu()) {
    if (left->length == 0) {
      return {at::empty_like(q_BTHK), at::empty_like(k_BTHK), at::empty_like(v_BTHK)};
    }
    // Places without a row have no gradient from behind, so they give none.
    kernels::Attention in_place = attention;
    in_place.out_BTHK = in_places(attention.out_BTHK, *left);
    const kernels::AttentionGradient gradient = kernels::causal_attention_gradient(
        in_places(gradient_BTHK, *left), in_places(q_BTHK, *left), in_places(k_BTHK, *left),
        in_places(v_BTHK, *left), in_place);
    return {.q_BTHK = from_places(gradient.q_BTHK, *left),
            .k_BTHK = from_places(gradient.k_BTHK, *left),
            .v_BTHK = from_places(gradient.v_BTHK, *left)};
  }
  const kernels::RaggedGradient gradient = kernels::ragged_attention_gradient(
      gradient_BTHK.squeeze(0), q_BTHK.squeeze(0), k_BTHK.squeeze(0), v_BTHK.squeeze(0),
      {.out_NHK = attention.out_BTHK.squeeze(0), .log_sum_exp = attention.log_sum_exp},
      left->sections);
  return {.q_BTHK = gradient.q_NHK.unsqueeze(0),
          .k_BTHK = gradient.k_MGK.unsqueeze(0),
          .v_BTHK = gradient.v_MGK.unsqueeze(0)};
}

}  // namespace dynmo::model
