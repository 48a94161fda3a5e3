// SPDX-License-Identifier: Apache-2.0
#pragma once

// Causal attention of rows that are no whole sequences: tokens of one bucket, tokens that a router
// chose, tokens that have not left. Rows come in sections, one behind the other; a query attends
// to the keys of its own section whose positions precede its own. It is the same loop over blocks
// as that of whole sequences (attention_impl.h), and gives its bits on them. On the CPU.
//
// Dimensions: N rows of queries, M rows of keys, H heads, G of the keys, K head size.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace dynmo::kernels {

enum class Mask {
  kCausal,  // a query sees keys up to its own position
  kStrict,  // ... and not the one at it
};

struct RaggedRows {
  // Section s has the rows offsets[s] to offsets[s + 1]; it may have none.
  std::vector<std::int64_t> offsets;
  std::vector<std::int32_t> positions;  // by row, ascending within a section
};

struct Ragged {
  RaggedRows queries;
  RaggedRows keys;  // as many sections
  Mask mask = Mask::kCausal;
};

// How many (query, key) there are of which the query sees the key: what the work of a head goes by.
[[nodiscard]] std::int64_t pairs_of(const Ragged& ragged);

// softmax(q k^T / sqrt(K)) v. A query that sees no key gives 0 and has no gradient. Heads of q are
// a multiple of those of k and v. Elements of a head lie together; results are contiguous, of q's
// type.
struct RaggedAttention {
  at::Tensor out_NHK;
  at::Tensor log_sum_exp;  // of the scores, [H, N]
};
[[nodiscard]] RaggedAttention ragged_attention(const at::Tensor& q_NHK, const at::Tensor& k_MGK,
                                               const at::Tensor& v_MGK, const Ragged& ragged);
struct RaggedGradient {
  at::Tensor q_NHK;
  at::Tensor k_MGK;
  at::Tensor v_MGK;
};
[[nodiscard]] RaggedGradient ragged_attention_gradient(
    const at::Tensor& gradient_NHK, const at::Tensor& q_NHK, const at::Tensor& k_MGK,
    const at::Tensor& v_MGK, const RaggedAttention& attention, const Ragged& ragged);

}  // namespace dynmo::kernels
