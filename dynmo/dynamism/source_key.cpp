// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/source_key.h"

#include <fmt/format.h>

#include <utility>

namespace dynmo::dynamism {
namespace {

std::string refusal(const SourceKey& key, UsedBy reader) {
  if (reader == UsedBy::kTraining && key.used_by == UsedBy::kLoad) {
    return "describes a simulated load: it belongs in a scenario, a training measures instead";
  }
  if (reader == UsedBy::kLoad && key.used_by == UsedBy::kTraining) {
    return "belongs in the config of a training, a scenario has no use for it";
  }
  return "";
}

// Returns the conditions with "table." before the names of their keys.
std::vector<ActsIf> of_table(std::string_view table, std::vector<ActsIf> conditions) {
  for (ActsIf& condition : conditions) {
    if (!condition.key.empty()) condition.key = fmt::format("{}.{}", table, condition.key);
    condition.or_if = of_table(table, std::move(condition.or_if));
  }
  return conditions;
}

}  // namespace

std::vector<TomlKey> toml_keys(std::string_view table, const std::vector<SourceKey>& keys,
                               UsedBy reader) {
  std::vector<TomlKey> all;
  for (const SourceKey& key : keys) {
    std::vector<ActsIf> conditions = key.acts_if;
    if (reader == UsedBy::kLoad) {
      conditions.insert(conditions.end(), key.acts_in_load_if.begin(), key.acts_in_load_if.end());
    }
    all.push_back({.name = fmt::format("{}.{}", table, key.name),
                   .field = key.field,
                   .allowed = key.allowed,
                   .acts_if = of_table(table, std::move(conditions)),
                   .help = std::string(key.help),
                   .refused = refusal(key, reader)});
  }
  return all;
}

}  // namespace dynmo::dynamism
