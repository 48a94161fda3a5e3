// SPDX-License-Identifier: Apache-2.0
#pragma once

// A layer that trades time for memory: what plan/recompute.h counts, done.

#include <memory>

#include "dynmo/model/layer.h"

namespace dynmo::model {

// The same layer, whose stash is its input and context until input_gradient, which runs forward
// once more and then what the layer itself does. Bit-equal to the layer: a layer's numbers, dropout
// included, are a function of state, input and context.
[[nodiscard]] std::shared_ptr<const Layer> recomputed(std::shared_ptr<const Layer> layer);

}  // namespace dynmo::model
