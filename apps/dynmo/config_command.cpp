// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "apps/dynmo/command.h"
#include "dynmo/config/config.h"
#include "dynmo/core/effects.h"
#include "dynmo/core/toml.h"

namespace dynmo::app {
namespace {

struct ConfigFlags {
  std::string file;
  std::vector<std::string> settings;
  bool defaults = false;
};

Expected<int> run_config(const ConfigFlags& flags) {
  const bool changes = !flags.file.empty() || !flags.settings.empty();
  DYNMO_TRY(check_flags({{"--defaults", flags.defaults, !changes, "neither FILE nor --set"}}));
  config::Config config;
  if (flags.defaults) {
    fmt::print("{}", dynmo::to_toml(config::keys_of(config)));
    return 0;
  }
  if (!flags.file.empty()) DYNMO_TRY(config::apply_file(config, flags.file));
  DYNMO_TRY(config::apply_settings(config, flags.settings));
  DYNMO_TRY(config::validate(config));
  fmt::print("{}", config::to_toml(config));
  return 0;
}

}  // namespace

void add_config_command(CLI::App& app, Command& chosen) {
  CLI::App* command = app.add_subcommand(
      "config", "Check the config of a training, and print it with all keys resolved");
  const auto flags = std::make_shared<ConfigFlags>();
  command->add_option("file", flags->file, "TOML file; defaults for all it leaves out");
  command->add_option("--set", flags->settings, "Change one key, such as --set train.steps=100")
      ->option_text("KEY=VALUE")
      ->allow_extra_args(false)
      ->take_all();
  command->add_flag("--defaults", flags->defaults, "Print every key with its default");
  run_when_parsed(command, chosen, flags, run_config);
}

}  // namespace dynmo::app
