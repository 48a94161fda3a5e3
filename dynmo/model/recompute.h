// SPDX-License-Identifier: Apache-2.0
#pragma once

// A layer that trades time for memory, as plan/recompute.h counts it.

#include <memory>

#include "dynmo/model/layer.h"

namespace dynmo::model {

// Returns the same layer with recomputation. Its stash is its input and context until
// input_gradient, which runs forward once more and then the layer's own gradient. Bit-equal to the
// layer, because a layer's numbers, dropout included, are a function of state, input and context.
[[nodiscard]] std::shared_ptr<const Layer> recomputed(std::shared_ptr<const Layer> layer);

}  // namespace dynmo::model
