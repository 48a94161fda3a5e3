// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/measured_keys.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/observe/run_folder.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

// Returns the keys of enabled sources that are "auto".
std::vector<TomlKey> auto_keys(config::Config& config) {
  const std::vector<std::string_view> enabled = config.sources.enabled_tables();
  std::vector<TomlKey> keys = keys_of(config);
  std::erase_if(keys, [&](const TomlKey& key) {
    const auto* number = std::get_if<TomlAuto>(&key.field);
    const std::string table = key.name.substr(0, key.name.find('.'));
    return number == nullptr || number->field->has_value() ||
           std::ranges::count(enabled, table) == 0;
  });
  return keys;
}

}  // namespace

Expected<std::vector<std::string>> measured_before(config::Config config) {
  std::vector<std::string> settings;
  const std::vector<TomlKey> missing = auto_keys(config);
  if (missing.empty()) return settings;
  const observe::RunFolder folder(config.run.directory);
  const std::filesystem::path path = folder.config();
  std::error_code fault;
  if (!std::filesystem::exists(folder.checkpoints(), fault)) return settings;  // restore() says so
  config::Config run;
  const auto read = apply_file(run, path);
  if (!read) {
    return make_error(ErrorCode::kBadInput,
                      "{} is auto, and what the run has measured cannot be read: {}; set it to the "
                      "number that the run printed",
                      missing.front().name, read.error().message);
  }
  const std::vector<TomlKey> theirs = keys_of(run);
  for (const TomlKey& key : missing) {
    const auto same = [&](const TomlKey& other) { return other.name == key.name; };
    settings.push_back(
        fmt::format("{}={}", key.name, toml_value(std::ranges::find_if(theirs, same)->field)));
  }
  DYNMO_TRY(apply_settings(config, settings));
  if (const auto still = auto_keys(config); !still.empty()) {
    return make_error(
        ErrorCode::kBadInput,
        "{} is auto and so it is in '{}': wanted the number that the run has measured",
        still.front().name, path.string());
  }
  return settings;
}

Expected<void> measure_keys(transport::Transport& transport, ResolvedRun& run,
                            const Reporter& reporter) {
  const config::Config& config = run.config();
  const std::int64_t tokens = config.batch.micro_batch_size * config.model.shape.sequence;
  std::vector<std::string> settings;
  std::vector<std::string> lines;
  const dynamism::MakeSources make_sources = sources_of(run.options(), run.model());
  for (const auto& source : make_sources(config.train.steps)) {
    for (const dynamism::Measured& found : source->measure(run.model().layers, tokens)) {
      const std::string key = fmt::format("{}.{}", source->name(), found.key);
      settings.push_back(fmt::format("{}={}", key, found.value));
      lines.push_back(fmt::format("auto     {} = {}, {}", key, found.value, found.why));
    }
  }
  if (settings.empty()) return {};
  DYNMO_ASSIGN(const auto all, transport::gather_texts(
                                   transport, transport::control_tag(transport::Control::kSettings),
                                   fmt::format("{}", fmt::join(settings, "\n"))));
  settings.clear();
  std::istringstream text(all.front());
  for (std::string setting; std::getline(text, setting);) settings.push_back(setting);
  DYNMO_TRY(run.set(settings));
  if (transport.rank() != transport::Member(0)) return {};
  for (const std::string& line : lines) reporter.say(line);
  return {};
}

}  // namespace dynmo::train
