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

// `name` without its table. The field outlives the key.
struct SourceKey {
  std::string_view name;
  TomlField field;
  Allowed allowed = {};
  std::string_view help;  // one line
  UsedBy used_by = UsedBy::kBoth;
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

// `names`, each with a value other than its default, do nothing because of `cause`, the value of
// another key ("moe.router = bias"). Nobody would notice, so the first of them is refused:
// kBadInput that names it, the cause and what it wants instead.
struct UnusedKeys {
  std::vector<std::string_view> names;
  std::string cause;
  std::string wanted;
};
[[nodiscard]] Expected<void> check_unused(std::string_view table, const std::vector<SourceKey>& now,
                                          const std::vector<SourceKey>& defaults,
                                          const UnusedKeys& unused);
template <typename Options>
[[nodiscard]] Expected<void> check_unused(std::string_view table, Options options,
                                          const UnusedKeys& unused) {
  Options defaults;
  return check_unused(table, keys_of(options), keys_of(defaults), unused);
}

}  // namespace dynmo::dynamism
