// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/source_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "dynmo/core/effects.h"
#include "dynmo/dynamism/combinations.h"
#include "dynmo/dynamism/registry.h"

namespace dynmo::dynamism {
namespace {

Readable named(std::string name) {
  return [name = std::move(name)](const std::string& given) -> Expected<void> {
    if (given == name) return {};
    return make_error(ErrorCode::kBadInput, "'{}'", given);
  };
}

}  // namespace

std::string load_name(std::string_view table) {
  std::string name(table);
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

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
    const ActsIf used = when("dynamism.source", named(load_name(one.entry.table)),
                             "dynamism.source = " + load_name(one.entry.table));
    const auto keys =
        only_if({used}, toml_keys(one.entry.table, one.entry.keys(one.options), UsedBy::kLoad));
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
    const ActsIf enabled = when(std::string(one.entry.table) + ".enabled", Names{"true"});
    const auto keys = only_if(
        {enabled}, toml_keys(one.entry.table, one.entry.keys(one.options), UsedBy::kTraining));
    all.insert(all.end(), keys.begin(), keys.end());
  }
  return all;
}

SourceOptions SourceOptions::defaults() const {
  SourceOptions result = *this;
  for (One& one : result.all_) {
    one.options = one.entry.defaults;
    one.enabled = false;
  }
  return result;
}

Expected<void> SourceOptions::check(std::string_view table) const {
  const One& one = of(table);
  return one.entry.check(one.options);
}

Expected<void> SourceOptions::check_training(const TrainingSetting& setting) const {
  for (const One& one : all_) {
    if (one.entry.trains) DYNMO_TRY(one.entry.check(one.options));
  }
  SourceOptions given = *this;
  SourceOptions standard = defaults();
  DYNMO_TRY(check_effects(given.training_keys(), standard.training_keys()));
  for (const One& one : all_) {
    if (one.enabled) DYNMO_TRY(one.entry.check_training(one.options, setting));
    const std::string idle = one.enabled ? idle_in(one.entry.table, setting) : "";
    if (!idle.empty()) return Error{ErrorCode::kBadInput, idle};
  }
  return check_combination(enabled_tables(), setting);
}

std::string SourceOptions::idle_in(std::string_view table, const TrainingSetting& setting) const {
  const One& one = of(table);
  if (setting.steps == 0) return "";
  const std::optional<Idle> idle = one.entry.idle_in(one.options, setting);
  return idle ? fmt::format("{}: {} in {} steps, as {}; wanted {}", idle->given, idle->nothing,
                            setting.steps, idle->why, idle->wanted)
              : "";
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
