// SPDX-License-Identifier: Apache-2.0
// `dynmo`: loads nothing of libtorch, so that it starts at once.
#include "apps/dynmo/config_command.h"
#include "apps/dynmo/ctl_command.h"
#include "apps/dynmo/data_command.h"
#include "apps/dynmo/plan_command.h"
#include "apps/dynmo/program.h"
#include "apps/dynmo/report_command.h"
#include "apps/dynmo/runtime_commands.h"
#include "apps/dynmo/simulate_command.h"
#include "apps/dynmo/trace_command.h"

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
