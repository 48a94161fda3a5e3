// SPDX-License-Identifier: Apache-2.0
// The program `dynmo-runtime` with the commands that need libtorch. `dynmo` executes it for them,
// and each rank is one.
#include "apps/dynmo/command.h"

int main(int argc, char** argv) {
  using namespace dynmo::app;
  return run_program(argc, argv, [argc, argv](CLI::App& app, Command& chosen) {
    add_train_command(app, {argv, argv + argc}, chosen);
    add_generate_command(app, chosen);
    add_checkpoint_command(app, chosen);
  });
}
