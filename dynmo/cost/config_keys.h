// SPDX-License-Identifier: Apache-2.0
#pragma once

// The keys of a config.json, with the names and the defaults of its family. The keys that were read
// are recorded, so that refuse_unread() finds keys that would change the shape but were not read.

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/family_table.h"
#include "dynmo/cost/transformer.h"

namespace dynmo::cost {

inline constexpr std::int64_t kMaxConfigSize = std::int64_t{1} << 30;

class ConfigKeys {
 public:
  // Reads `json`, the object at `pointer` of the file `origin`. A key that the file sets to null
  // has no default.
  ConfigKeys(const Json& json, const FamilyRow& row, std::string origin, std::string pointer);
  ConfigKeys(const ConfigKeys&) = delete;
  ConfigKeys& operator=(const ConfigKeys&) = delete;

  // Returns the value, or nullptr if it is absent or null.
  [[nodiscard]] const Json* find(const std::string& key);
  [[nodiscard]] bool has(const std::string& key) { return find(key) != nullptr; }
  // Returns the first of these names that the file has. If it has none, returns the first name.
  [[nodiscard]] std::string first_of(std::initializer_list<std::string_view> keys);
  // Returns a whole number from `least` to kMaxConfigSize. Without a fallback the key is required.
  [[nodiscard]] std::int64_t size(const std::string& key, std::optional<std::int64_t> fallback = {},
                                  std::int64_t least = 1);
  [[nodiscard]] bool flag(const std::string& key, bool fallback);
  // Returns the text of one string, number or flag for each block, or nothing if the key is absent.
  // A list may be longer: it ends with the blocks of multi-token prediction.
  [[nodiscard]] std::vector<std::string> list(const std::string& key, std::int64_t blocks);

  void fail(const std::string& key, std::string_view message);
  // Refuses the first key of the file that changes shapes, is set, and was not read.
  void refuse_unread(std::string_view type);
  [[nodiscard]] Expected<void> finish();

 private:
  [[nodiscard]] std::string own(const std::string& key) const;

  Json names_;
  Json kept_;  // with defaults, without nulls
  Json given_;
  std::set<std::string> asked_;
  JsonObject object_;
};

// Sets the sizes, the fields that all blocks have in common, and the half blocks of `shape`.
// Sequence and micro-batch of `shape` are already set. Faults are recorded in `keys`. After one,
// `shape` is not valid.
void read_blocks(ConfigKeys& keys, const FamilyRow& row, TransformerShape& shape);

// Returns "full_attention", "sliding_attention", "linear_attention", ... for each block.
[[nodiscard]] std::vector<std::string> attention_kinds(ConfigKeys& keys, const FamilyRow& row,
                                                       std::int64_t blocks);
// Returns for each block whether it has an indexer. A block without one uses the choice of an
// earlier block.
[[nodiscard]] std::vector<bool> own_indexers(ConfigKeys& keys, std::int64_t blocks);
// Returns for each block whether it has experts, in a model with experts.
[[nodiscard]] std::vector<bool> sparse_blocks(ConfigKeys& keys, std::int64_t blocks);
// Returns "mamba", "attention", "mlp" or "moe" for each block of one mixer. There is at least one
// block.
[[nodiscard]] std::vector<std::string> single_kinds(ConfigKeys& keys);
// Returns for each block the number of tokens that become one key: 0 (none), 4 or 128.
[[nodiscard]] std::vector<std::int64_t> compressions(ConfigKeys& keys, std::int64_t blocks);

}  // namespace dynmo::cost
