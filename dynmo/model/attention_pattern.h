// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which pairs of tokens an attention layer looks at, where it does not look at all of them. A
// pattern chooses rows of queries and keys for every micro-batch; attention runs on the chosen ones
// alone (ragged_attention.h), so that its time goes by their pairs.
//
// Dimensions as in operations.h, G key heads.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/model/layer.h"
#include "dynmo/model/operations.h"
#include "dynmo/model/ragged_attention.h"

namespace dynmo::model {

// Rows of x_BTHK in sections, int64. Row (b T + t) H + h is head h of token t; the heads are those
// of the queries, also for keys. A section has rows of one head of one sequence, and no row is in
// two sections. Sections go by sequence, then by head; within a section tokens ascend.
struct Selection {
  at::Tensor queries;
  at::Tensor query_offsets;
  at::Tensor keys;
  at::Tensor key_offsets;
  Mask mask = Mask::kCausal;
};

// Immutable; any thread may use it.
class AttentionPattern {
 public:
  virtual ~AttentionPattern() = default;
  // Keys are the queries, of norm 1: the layer has no projection of keys.
  [[nodiscard]] virtual bool shares_keys() const = 0;
  // A function of its arguments, the same whatever follows a token: what is chosen of a token
  // depends on it and on those before alone. Queries as they are before rotation.
  [[nodiscard]] virtual Selection select(const at::Tensor& q_BTHK, const LayerState& state,
                                         const LayerContext& context) const = 0;
};

// An attention layer derives from this class too, so that a source of dynamism can give it a
// pattern. Such a layer has the figures below, and reads whole texts: it takes no KeyValueCache.
class TakesPattern {
 public:
  virtual ~TakesPattern() = default;
  [[nodiscard]] virtual std::shared_ptr<const Layer> with(
      std::shared_ptr<const AttentionPattern> pattern) const = 0;
};

// Figures of a layer with a pattern: pairs (query, key) of all heads and sequences that it looked
// at, and those that causal attention has.
enum PatternFigure { kPairs, kCausalPairs, kPatternFigures };
[[nodiscard]] std::vector<std::string> pattern_figures();
[[nodiscard]] std::vector<double> pattern_figures_of(const at::Tensor& q_BTHK,
                                                     const Selection& selection);

// As causal_attention and its gradient, on the selection. Queries that are not chosen, or see no
// key, give 0. Undefined k: shared keys, whose gradient is in that of q, and k's is undefined.
[[nodiscard]] Attention selected_attention(const at::Tensor& q_BTHK, const at::Tensor& k_BTGK,
                                           const at::Tensor& v_BTGK, const Selection& selection);
[[nodiscard]] AttentionGradient selected_attention_gradient(
    const at::Tensor& gradient_BTHK, const at::Tensor& q_BTHK, const at::Tensor& k_BTGK,
    const at::Tensor& v_BTGK, const Attention& attention, const Selection& selection);

// Angular hashes (Andoni et al., "Practical and optimal LSH for angular distance", 2015): for each
// row the number 0 to 2 S - 1 of that of its head's S directions and their opposites that it points
// along most: 2 s of direction s, 2 s + 1 of its opposite; int32, BHT. Sums are taken in one
// order, so that a row's hash does not depend on the others. directions: fp64, HKS.
[[nodiscard]] at::Tensor angular_hashes(const at::Tensor& x_BTHK, const at::Tensor& directions_HKS);

}  // namespace dynmo::model
