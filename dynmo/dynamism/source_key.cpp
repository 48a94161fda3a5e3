// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/source_key.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

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

}  // namespace

std::vector<TomlKey> toml_keys(std::string_view table, const std::vector<SourceKey>& keys,
                               UsedBy reader) {
  std::vector<TomlKey> all;
  for (const SourceKey& key : keys) {
    all.push_back({.name = fmt::format("{}.{}", table, key.name),
                   .field = key.field,
                   .allowed = key.allowed,
                   .help = std::string(key.help),
                   .refused = refusal(key, reader)});
  }
  return all;
}

Expected<void> check_unused(std::string_view table, const std::vector<SourceKey>& now,
                            const std::vector<SourceKey>& defaults, const UnusedKeys& unused) {
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (std::ranges::count(unused.names, now[i].name) == 0) continue;
    const std::string value = toml_value(now[i].field);
    if (value == toml_value(defaults[i].field)) continue;
    return make_error(ErrorCode::kBadInput,
                      "{0}.{1} is {2} with {3}, which does not use it: wanted {4}, or no {0}.{1}",
                      table, now[i].name, value, unused.cause, unused.wanted);
  }
  return {};
}

}  // namespace dynmo::dynamism
