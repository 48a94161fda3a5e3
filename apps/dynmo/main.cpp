// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <system_error>
#include <vector>

#include "apps/dynmo/checkpoint_command.h"
#include "apps/dynmo/command.h"
#include "apps/dynmo/data_command.h"
#include "apps/dynmo/generate_command.h"
#include "apps/dynmo/plan_command.h"
#include "apps/dynmo/report_command.h"
#include "apps/dynmo/simulate_command.h"
#include "apps/dynmo/trace_command.h"
#include "apps/dynmo/train_command.h"
#include "dynmo/core/nearest.h"

namespace {

using dynmo::app::Command;

int print_error(std::string message, int exit_code) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  fmt::print(stderr, "dynmo: error: {}\n", message);
  return exit_code;
}

// What a person needs to hear of a parse error. CLI11 reports a missing subcommand or flag before a
// misspelt one, which is its cause.
std::string explain(const CLI::App& app, const CLI::ParseError& fault) {
  if (const std::string text = fault.what(); dynamic_cast<const CLI::ConversionError*>(&fault)) {
    const std::string_view prefix = "Could not convert: ";
    return fmt::format("{}, wanted a number the flag can hold",
                       text.starts_with(prefix) ? text.substr(prefix.size()) : text);
  }
  const auto unknown = app.remaining(/*recurse=*/true);
  if (unknown.empty()) return fault.what();
  const CLI::App* last = &app;  // the innermost subcommand that was understood
  while (!last->get_subcommands().empty()) last = last->get_subcommands().front();
  std::vector<std::string> known;
  for (const CLI::App* command : last->get_subcommands([](const CLI::App*) { return true; })) {
    known.push_back(command->get_name());
  }
  for (const CLI::Option* option : last->get_options()) {
    if (!option->get_lnames().empty()) known.push_back("--" + option->get_lnames().front());
  }
  return fmt::format("'{}' is not known here{}", unknown.front(),
                     dynmo::suggestion(unknown.front(), known));
}

// 0 and a command; or the exit code to end with, all being said.
int parse(int argc, char** argv, Command& chosen) {
  CLI::App app("DynMo: balanced and elastic pipelines for dynamic language models", "dynmo");
  app.set_version_flag("--version", "dynmo " DYNMO_VERSION);
  app.require_subcommand(1);
  dynmo::app::add_data_command(app, chosen);
  dynmo::app::add_plan_command(app, chosen);
  dynmo::app::add_simulate_command(app, chosen);
  dynmo::app::add_train_command(app, {argv, argv + argc}, chosen);
  dynmo::app::add_generate_command(app, chosen);
  dynmo::app::add_checkpoint_command(app, chosen);
  dynmo::app::add_report_command(app, chosen);
  dynmo::app::add_trace_command(app, chosen);
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& fault) {
    if (fault.get_exit_code() == 0) return app.exit(fault);  // --help, --version
    return print_error(explain(app, fault) + " (see --help)",
                       dynmo::exit_code(dynmo::ErrorCode::kBadInput));
  }
}

int run(const Command& command) {
  const auto done = command();
  if (done && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)) {
    return print_error(fmt::format("cannot write to standard output: {}", std::strerror(errno)),
                       dynmo::exit_code(dynmo::ErrorCode::kBadInput));
  }
  if (done) return *done;
  return print_error(done.error().message, dynmo::exit_code(done.error().code));
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file at its limit is an error of the write, like a full disk
  try {
    Command chosen;
    const int code = parse(argc, argv, chosen);
    return chosen ? run(chosen) : code;
  } catch (const std::system_error& fault) {
    if (std::string_view(fault.what()).starts_with("cannot write to file")) {  // fmt::print
      return print_error(fmt::format("cannot write to standard output: {}", fault.code().message()),
                         dynmo::exit_code(dynmo::ErrorCode::kBadInput));
    }
    return print_error(fault.what(), dynmo::exit_code(dynmo::ErrorCode::kInternal));
  } catch (const std::exception& fault) {
    return print_error(fault.what(), dynmo::exit_code(dynmo::ErrorCode::kInternal));
  }
}
