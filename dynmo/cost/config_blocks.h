// SPDX-License-Identifier: Apache-2.0
#pragma once

// The half blocks that a config.json describes: which kind each block is, and its sizes.

#include <vector>

#include "dynmo/cost/config_keys.h"
#include "dynmo/cost/transformer.h"

namespace dynmo::cost {

// Fills in the sizes, the fields that are common to all blocks, and the half blocks of `shape`,
// which has sequence and micro-batch already. Faults stick in `keys`; the shape is then of no use.
void read_blocks(ConfigKeys& keys, const FamilyRow& row, TransformerShape& shape);

}  // namespace dynmo::cost
