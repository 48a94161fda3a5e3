// SPDX-License-Identifier: Apache-2.0
#pragma once

// Whole blocks of a model. DynMo's layers are halves of blocks and slices of a head. Frameworks
// that place whole modules take the sums of these.

#include <string_view>

#include "dynmo/cost/layer_cost.h"

namespace dynmo::cost {

// Returns the name of a layer's module. It is "blocks.3" for "blocks.3.mlp", and "head" for "head.0
// of 4". For any other layer it is the name itself.
[[nodiscard]] std::string_view module_of(std::string_view name);

// Returns whether the name is that of a block or of a part of one.
[[nodiscard]] bool is_block(std::string_view name);

// Returns the number of layers that the head is cut into, by their names; 1 for a whole head.
[[nodiscard]] int head_slices(const ModelCost& model);

enum class HeadSlices {
  kJoined,
  kApart,
};

// Joins neighbouring layers of one module: times and bytes are summed, and the boundary is that of
// the last. A block is frozen if all its parts are. In other blocks, passes that frozen parts do
// not run are left out.
[[nodiscard]] ModelCost joined_blocks(const ModelCost& model,
                                      HeadSlices slices = HeadSlices::kJoined);

}  // namespace dynmo::cost
