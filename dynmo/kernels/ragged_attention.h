// SPDX-License-Identifier: Apache-2.0
#pragma once

// Causal attention on the CPU for rows that are no whole sequences. Examples are tokens of one
// bucket, tokens that a router chose, and tokens that have not exited. Rows come in consecutive
// sections. A query attends to the keys of its own section up to its own position.
//
// It uses the same loop over blocks as whole sequences (attention_impl.h), and gives the same bits
// on them.
//
// Dimensions: N rows of queries, M rows of keys, H heads, G of the keys, K head size.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace dynmo::kernels {

enum class Mask {
  kCausal,  // a query sees keys up to its own position
  kStrict,  // a query sees keys before its own position
};

struct RaggedRows {
  // Section s has the rows offsets[s] to offsets[s + 1]. It may have none.
  std::vector<std::int64_t> offsets;
  std::vector<std::int32_t> positions;  // by row, ascending within a section
};

struct Ragged {
  RaggedRows queries;
  RaggedRows keys;  // same number of sections
  Mask mask = Mask::kCausal;
};

// Returns the number of pairs (query, key) in which the query sees the key. The work of a head is
// proportional to it.
[[nodiscard]] std::int64_t pairs_of(const Ragged& ragged);

// The result of softmax(q k^T / sqrt(K)) v. A query without keys gives 0 and has no gradient. The
// number of heads of q is a multiple of that of k and v. The elements of a head are contiguous.
// Results are contiguous and have q's type.
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
