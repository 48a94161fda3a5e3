// SPDX-License-Identifier: Apache-2.0
#pragma once

// The pairs of tokens that an attention layer computes, if it does not compute all of them. A
// pattern chooses rows of queries and keys for every micro-batch. Attention runs on the chosen rows
// alone (kernels/selected_attention.h), so its time is proportional to their pairs.
//
// Dimensions as in operations.h, G key heads.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/kernels/selected_attention.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

// Chooses the pairs of queries and keys that attention computes. Immutable; any thread may use it.
class AttentionPattern {
 public:
  virtual ~AttentionPattern() = default;
  // Returns whether each key is its query, scaled to norm 1. The layer then projects no keys.
  [[nodiscard]] virtual bool shares_keys() const = 0;
  // Chooses rows of the queries, which are not rotated yet. The result is a function of the
  // arguments. For a token it depends on that token and earlier ones alone.
  [[nodiscard]] virtual kernels::Selection select(const at::Tensor& q_BTHK, const LayerState& state,
                                                  const LayerContext& context) const = 0;
};

// A second base of attention layers, through which a source of dynamism gives them a pattern. A
// layer with a pattern has the figures below. It reads whole texts, so it takes no KeyValueCache.
class TakesPattern {
 public:
  virtual ~TakesPattern() = default;
  [[nodiscard]] virtual std::shared_ptr<const Layer> with(
      std::shared_ptr<const AttentionPattern> pattern) const = 0;
};

// Figures of a layer with a pattern, over all heads and sequences: the pairs (query, key) that it
// computed, and those of causal attention.
enum PatternFigure { kPairs, kCausalPairs, kPatternFigures };
[[nodiscard]] inline std::vector<std::string> pattern_figures() {
  return {"pairs", "causal_pairs"};
}
[[nodiscard]] inline double causal_pairs_of(const at::Tensor& q_BTHK) {
  const std::int64_t tokens = q_BTHK.size(1);
  return static_cast<double>(q_BTHK.size(0) * q_BTHK.size(2) * (tokens * (tokens + 1) / 2));
}
// Returns the pairs of a selection, and all causal pairs. Waits for the device, if q is on one.
[[nodiscard]] inline std::vector<double> pattern_figures_of(const at::Tensor& q_BTHK,
                                                            const kernels::Selection& selection) {
  return {static_cast<double>(kernels::pairs_of(q_BTHK, selection)), causal_pairs_of(q_BTHK)};
}

}  // namespace dynmo::model
