// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/source_options.h"

#include <algorithm>
#include <string>
#include <utility>

#include "dynmo/dynamism/combinations.h"
#include "dynmo/dynamism/registry.h"

namespace dynmo::dynamism {

SourceOptions::SourceOptions() : SourceOptions(built_in_sources()) {}

SourceOptions::SourceOptions(std::vector<SourceEntry> entries) {
  for (SourceEntry& entry : entries) {
    std::any defaults = entry.defaults;
    all_.push_back({.entry = std::move(entry), .options = std::move(defaults)});
  }
}

std::vector<std::string_view> SourceOptions::tables() const {
  std::vector<std::string_view> tables;
  for (const One& one : all_) tables.push_back(one.entry.table);
  return tables;
}

std::vector<std::string_view> SourceOptions::enabled_tables() const {
  std::vector<std::string_view> tables;
  for (const One& one : all_) {
    if (one.enabled) tables.push_back(one.entry.table);
  }
  return tables;
}

std::vector<TomlKey> SourceOptions::scenario_keys() {
  std::vector<TomlKey> all;
  for (One& one : all_) {
    const auto keys = toml_keys(one.entry.table, one.entry.keys(one.options), UsedBy::kLoad);
    all.insert(all.end(), keys.begin(), keys.end());
    all.push_back({.name = std::string(one.entry.table) + ".enabled",
                   .field = &one.enabled,
                   .refused = "belongs in the config of a training: a scenario names its source in "
                              "dynamism.source"});
  }
  return all;
}

std::vector<TomlKey> SourceOptions::training_keys() {
  std::vector<TomlKey> all;
  for (One& one : all_) {
    if (!one.entry.trains) continue;
    all.push_back({.name = std::string(one.entry.table) + ".enabled",
                   .field = &one.enabled,
                   .help = "the training does it"});
    const auto keys = toml_keys(one.entry.table, one.entry.keys(one.options), UsedBy::kTraining);
    all.insert(all.end(), keys.begin(), keys.end());
  }
  return all;
}

Expected<void> SourceOptions::check(std::string_view table) const {
  const One& one = of(table);
  return one.entry.check(one.options);
}

Expected<void> SourceOptions::check_training(const TrainingSetting& setting) const {
  for (const One& one : all_) {
    if (one.entry.trains) DYNMO_TRY(one.entry.check(one.options));
    if (one.enabled) DYNMO_TRY(one.entry.check_training(one.options, setting));
  }
  return check_combination(enabled_tables(), setting);
}

Expected<std::unique_ptr<LoadModel>> SourceOptions::make_load(std::string_view table,
                                                              const LoadInputs& inputs) const {
  const One& one = of(table);
  return one.entry.make_load(one.options, inputs);
}

const SourceOptions::One& SourceOptions::with(const std::type_info& type) const {
  const auto found = std::find_if(all_.begin(), all_.end(),
                                  [&](const One& one) { return one.options.type() == type; });
  DYNMO_CHECK(found != all_.end(), "options of a source that is registered, got {}", type.name());
  return *found;
}

const SourceOptions::One& SourceOptions::of(std::string_view table) const {
  const auto found = std::find_if(all_.begin(), all_.end(),
                                  [&](const One& one) { return one.entry.table == table; });
  DYNMO_CHECK(found != all_.end(), "a source that is registered, got '{}'", table);
  return *found;
}

}  // namespace dynmo::dynamism
