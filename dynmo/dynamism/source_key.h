// SPDX-License-Identifier: Apache-2.0
#pragma once

// The keys of a source's TOML table: one table for a training's config and for a scenario, so that
// a key means the same in both.

#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/allowed.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/toml.h"

namespace dynmo::dynamism {

enum class UsedBy {
  kBoth,
  kTraining,
  kLoad,  // describes how a simulated load behaves, which a training finds out by itself
};

// `name`, and those of its conditions, are without their table. The field outlives the key.
struct SourceKey {
  std::string_view name;
  TomlField field;
  Allowed allowed = {};
  std::string_view help;  // one line
  UsedBy used_by = UsedBy::kBoth;
  std::vector<ActsIf> acts_if = {};
  std::vector<ActsIf> acts_in_load_if = {};  // further ones of a scenario
};

// The same keys as core/toml.h has them, as `table`.NAME. Those that `reader` (kTraining or kLoad)
// does not use are there too, refused with the reason; of kBoth none is.
[[nodiscard]] std::vector<TomlKey> toml_keys(std::string_view table,
                                             const std::vector<SourceKey>& keys, UsedBy reader);

// kBadInput naming "table.key" for the first value that its key does not allow.
template <typename Options>
[[nodiscard]] Expected<void> check_key_values(std::string_view table, Options options) {
  return check_values(toml_keys(table, keys_of(options), UsedBy::kBoth));
}

}  // namespace dynmo::dynamism
