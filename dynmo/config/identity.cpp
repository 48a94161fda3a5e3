// SPDX-License-Identifier: Apache-2.0
// Decides which configs continue one another.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/config/config_impl.h"
#include "dynmo/core/digest.h"

namespace dynmo::config {
namespace {

// Returns whether `table` is that of an enabled source. Other sources are left out of identities.
// So a new key of theirs does not make existing checkpoints unusable.
bool is_enabled_source(const dynamism::SourceOptions& sources, std::string_view table) {
  const std::vector<std::string_view> enabled = sources.enabled_tables();
  return std::find(enabled.begin(), enabled.end(), table) != enabled.end();
}

// Returns the keys of the identity and their values. The micro-batches of a step are one number.
std::vector<std::pair<std::string, std::string>> deciding_values(const Config& config) {
  Config copy = resolved(config);
  copy.batch.micro_batches = step_micro_batches(config);
  copy.batch.accumulation = 1;
  copy.model.shape.head_slices = 1;  // it changes only the last bits
  if (on_device(copy)) copy.run.device = "cpu";
  std::vector<std::pair<std::string, std::string>> values;
  for (const TomlKey& key : keys_of(copy)) {
    const std::string table = key.name.substr(0, key.name.find('.'));
    const bool decides = table == "model" || table == "batch" || table == "optimizer" ||
                         table == "emulated" || key.name == "run.device" ||
                         key.name == "train.steps" || key.name == "train.seed" ||
                         is_enabled_source(copy.sources, table);
    // Speeds change no number.
    const bool speeds = key.name.starts_with("emulated.slow_");
    if (decides && !speeds && key.refused.empty())
      values.emplace_back(key.name, toml_value(key.field));
  }
  return values;
}

}  // namespace

std::string identity(const Config& config) {
  std::string text;
  for (const auto& [key, value] : deciding_values(config)) {
    text += fmt::format("{}={}\n", key, value);
  }
  return digest_of(text).hex();
}

std::string first_difference(const Config& given, const Config& saved) {
  const auto ours = deciding_values(given);
  const auto theirs = deciding_values(saved);
  const auto value_in = [](const auto& values, const std::string& key) {
    const auto same = [&](const auto& entry) { return entry.first == key; };
    const auto found = std::find_if(values.begin(), values.end(), same);
    return found == values.end() ? std::string("not used") : found->second;
  };
  const auto text = [&](const std::string& key) {
    const std::string name = key == "batch.micro_batches"
                                 ? "pipeline.replicas x batch.accumulation x batch.micro_batches"
                                 : key;
    return fmt::format("{} is {}, the run's is {}", name, value_in(ours, key),
                       value_in(theirs, key));
  };
  // If only one of them enables a source, all its keys differ, so the message names the switch.
  for (const std::string_view table : saved.sources.enabled_tables()) {
    if (is_enabled_source(given.sources, table)) continue;
    return fmt::format("{}.enabled is false, the run's is true", table);
  }
  for (const std::string_view table : given.sources.enabled_tables()) {
    if (is_enabled_source(saved.sources, table)) continue;
    return fmt::format("{}.enabled is true, the run's is false", table);
  }
  for (const auto& [key, value] : ours) {
    if (value != value_in(theirs, key)) return text(key);
  }
  return "";
}

}  // namespace dynmo::config
