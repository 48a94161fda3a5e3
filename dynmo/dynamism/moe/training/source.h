// SPDX-License-Identifier: Apache-2.0
#pragma once

// Mixture of experts in real training: every block's MLP becomes experts (model/moe.h), all of them
// on the rank of their layer. What they are given is counted: layers of unequal counts would be
// slow where the experts of a layer lie on several devices, and straggler factors say by how much.

#include <memory>

#include "dynmo/dynamism/moe/options.h"
#include "dynmo/dynamism/training/source.h"

namespace dynmo::dynamism {

// Requires valid options.
[[nodiscard]] std::unique_ptr<Source> make_moe_source(const MoeOptions& options);

}  // namespace dynmo::dynamism
