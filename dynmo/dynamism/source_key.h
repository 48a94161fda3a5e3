// SPDX-License-Identifier: Apache-2.0
#pragma once

// The keys of a source's TOML table. A training's config and a scenario share one table, so a key
// has the same meaning in both.

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
  kLoad,  // behaviour of a simulated load, which a training measures
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

// Returns the keys for core/toml.h, as `table`.NAME. Keys that `reader` (kTraining or kLoad) does
// not use are included, with the reason of refusal. For kBoth no key is refused.
[[nodiscard]] std::vector<TomlKey> toml_keys(std::string_view table,
                                             const std::vector<SourceKey>& keys, UsedBy reader);

// Checks the values. Returns kBadInput with "table.key" for the first value that its key does not
// allow.
template <typename Options>
[[nodiscard]] Expected<void> check_key_values(std::string_view table, Options options) {
  return check_values(toml_keys(table, keys_of(options), UsedBy::kBoth));
}

}  // namespace dynmo::dynamism
