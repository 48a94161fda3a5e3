// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kind of each block of a config.json. Families describe it by lists, patterns, intervals or
// first blocks. A fault is recorded in `keys`.

#include <cstdint>
#include <string>
#include <vector>

#include "dynmo/cost/config_keys.h"

namespace dynmo::cost {

// Returns "full_attention", "sliding_attention", "linear_attention", ... for each block.
[[nodiscard]] std::vector<std::string> attention_kinds(ConfigKeys& keys, const FamilyRow& row,
                                                       std::int64_t blocks);
// Returns for each block whether it has an indexer. Others use the choice of an earlier block.
[[nodiscard]] std::vector<bool> own_indexers(ConfigKeys& keys, std::int64_t blocks);
// Returns for each block whether it has experts, in a model with experts.
[[nodiscard]] std::vector<bool> sparse_blocks(ConfigKeys& keys, std::int64_t blocks);
// Returns "mamba", "attention", "mlp" or "moe" for each block of one mixer. There is at least one
// block.
[[nodiscard]] std::vector<std::string> single_kinds(ConfigKeys& keys);
// Returns for each block the number of tokens that become one key: 0 (none), 4 or 128.
[[nodiscard]] std::vector<std::int64_t> compressions(ConfigKeys& keys, std::int64_t blocks);

}  // namespace dynmo::cost
