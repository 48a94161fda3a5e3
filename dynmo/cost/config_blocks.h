// SPDX-License-Identifier: Apache-2.0
#pragma once

// The half blocks that a config.json describes: the kind of each block, and its sizes.

#include <vector>

#include "dynmo/cost/config_keys.h"
#include "dynmo/cost/transformer.h"

namespace dynmo::cost {

// Sets the sizes, the fields that all blocks have in common, and the half blocks of `shape`.
// Sequence and micro-batch of `shape` are already set. Faults are recorded in `keys`. After one,
// `shape` is not valid.
void read_blocks(ConfigKeys& keys, const FamilyRow& row, TransformerShape& shape);

}  // namespace dynmo::cost
