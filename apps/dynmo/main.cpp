// SPDX-License-Identifier: Apache-2.0
// The program `dynmo`. It loads nothing of libtorch, so that it starts at once.
#include "apps/dynmo/command.h"

int main(int argc, char** argv) {
  using namespace dynmo::app;
  return run_program(argc, argv, [argv](CLI::App& app, Command& chosen) {
    add_data_command(app, chosen);
    add_plan_command(app, chosen);
    add_simulate_command(app, chosen);
    add_runtime_commands(app, argv, chosen);
    add_config_command(app, chosen);
    add_ctl_command(app, chosen);
    add_report_command(app, chosen);
    add_trace_command(app, chosen);
  });
}
