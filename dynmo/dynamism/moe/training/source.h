// SPDX-License-Identifier: Apache-2.0
#pragma once

// Mixture of experts in real training. Every block's MLP becomes experts (model/moe.h), all of them
// on the rank of their layer. Their tokens are counted. If the experts of a layer were on several
// devices, unequal counts would slow it down. Straggler factors measure by how much.

#include <memory>

#include "dynmo/dynamism/moe/options.h"
#include "dynmo/dynamism/training/source.h"

namespace dynmo::dynamism {

// Makes the source. Requires valid options.
[[nodiscard]] std::unique_ptr<Source> make_moe_source(const MoeOptions& options);

}  // namespace dynmo::dynamism
