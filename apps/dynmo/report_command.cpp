// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/report_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "apps/dynmo/terminal.h"
#include "dynmo/observe/run_report.h"

namespace dynmo::app {

void add_report_command(CLI::App& app, Command& chosen) {
  CLI::App* command = app.add_subcommand(
      "report", "Reprint the final report of a run, with a table of its layers and its traffic");
  const auto run = std::make_shared<std::string>();
  command->add_option("run", *run, "Folder of a run")->required();
  command->callback([run, &chosen] {
    chosen = [run]() -> Expected<int> {
      DYNMO_ASSIGN(const std::string text, observe::read_report(*run));
      fmt::print("{}", for_terminal(text));
      return 0;
    };
  });
}

}  // namespace dynmo::app
