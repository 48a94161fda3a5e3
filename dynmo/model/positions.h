// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tokens that are no whole sequences, but some of them: they keep the positions that they had.

#include <ATen/core/Tensor.h>

#include <memory>

#include "dynmo/model/layer.h"

namespace dynmo::model {

// A layer derives from this class too, if its arithmetic depends on the positions of its tokens.
class TakesPositions {
 public:
  virtual ~TakesPositions() = default;
  // Layer::forward of tokens at these positions of their sequences, int64, ascending in each. Its
  // stash is one of the layer's own.
  [[nodiscard]] virtual Output forward_at(const LayerState& state, const Hidden& input,
                                          const at::Tensor& positions_BT,
                                          const LayerContext& context,
                                          std::unique_ptr<Stash>* stash) const = 0;
};

// Runs any layer: those that take no positions do not depend on them.
[[nodiscard]] inline Output forward_at(const Layer& layer, const LayerState& state,
                                       const Hidden& input, const at::Tensor& positions_BT,
                                       const LayerContext& context, std::unique_ptr<Stash>* stash) {
  const auto* takes = dynamic_cast<const TakesPositions*>(&layer);
  return takes == nullptr ? layer.forward(state, input, context, stash)
                          : takes->forward_at(state, input, positions_BT, context, stash);
}

}  // namespace dynmo::model
