// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which kind each block of a config.json is. Families say it in many ways: lists, patterns,
// intervals, first blocks. A fault sticks in `keys`.

#include <cstdint>
#include <string>
#include <vector>

#include "dynmo/cost/config_keys.h"

namespace dynmo::cost {

// "full_attention", "sliding_attention", "linear_attention", ... of every block.
[[nodiscard]] std::vector<std::string> attention_kinds(ConfigKeys& keys, const FamilyRow& row,
                                                       std::int64_t blocks);
// Whether a block's indexer is its own: blocks may share the choice of an earlier one.
[[nodiscard]] std::vector<bool> own_indexers(ConfigKeys& keys, std::int64_t blocks);
// Which blocks have experts, in a model that has some.
[[nodiscard]] std::vector<bool> sparse_blocks(ConfigKeys& keys, std::int64_t blocks);
// "mamba", "attention", "mlp" or "moe" of every block of one mixer; at least one block.
[[nodiscard]] std::vector<std::string> single_kinds(ConfigKeys& keys);
// Tokens that become one key, of every block: 0 (none), 4 or 128.
[[nodiscard]] std::vector<std::int64_t> compressions(ConfigKeys& keys, std::int64_t blocks);

}  // namespace dynmo::cost
