// SPDX-License-Identifier: Apache-2.0
// `dynmo-runtime`: the commands that need libtorch. `dynmo` executes it for them, and starts ranks
// as it.
#include "apps/dynmo/command.h"

int main(int argc, char** argv) {
  using namespace dynmo::app;
  return run_program(argc, argv, [argc, argv](CLI::App& app, Command& chosen) {
    add_train_command(app, {argv, argv + argc}, chosen);
    add_generate_command(app, chosen);
    add_checkpoint_command(app, chosen);
  });
}
