// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which pairs of tokens an attention layer looks at, where it does not look at all of them. A
// pattern chooses rows of queries and keys for every micro-batch; attention runs on the chosen ones
// alone (kernels/selected_attention.h), so that its time goes by their pairs.
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

// Immutable; any thread may use it.
class AttentionPattern {
 public:
  virtual ~AttentionPattern() = default;
  // Keys are the queries, of norm 1: the layer has no projection of keys.
  [[nodiscard]] virtual bool shares_keys() const = 0;
  // A function of its arguments, the same whatever follows a token: what is chosen of a token
  // depends on it and on those before alone. Queries as they are before rotation.
  [[nodiscard]] virtual kernels::Selection select(const at::Tensor& q_BTHK, const LayerState& state,
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
[[nodiscard]] inline std::vector<std::string> pattern_figures() {
  return {"pairs", "causal_pairs"};
}
[[nodiscard]] inline std::vector<double> pattern_figures_of(const at::Tensor& q_BTHK,
                                                            const kernels::Selection& selection) {
  const std::int64_t tokens = q_BTHK.size(1);
  return {static_cast<double>(kernels::pairs_of(q_BTHK, selection)),
          static_cast<double>(q_BTHK.size(0) * q_BTHK.size(2) * (tokens * (tokens + 1) / 2))};
}

}  // namespace dynmo::model
