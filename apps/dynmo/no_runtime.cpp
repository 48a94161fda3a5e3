// SPDX-License-Identifier: Apache-2.0
// Stands in for the commands that need libtorch where DynMo is built without its runtime.
#include "apps/dynmo/checkpoint_command.h"
#include "apps/dynmo/generate_command.h"
#include "apps/dynmo/train_command.h"

namespace dynmo::app {
namespace {

void add_missing(CLI::App& app, const std::string& name, Command& chosen) {
  CLI::App* command = app.add_subcommand(name, "(this build is without the runtime)");
  command->allow_extras();
  command->callback([name, &chosen] {
    chosen = [name]() -> Expected<int> {
      return make_error(
          ErrorCode::kBadInput,
          "dynmo {}: this build is without the runtime; configure with -DDYNMO_RUNTIME=ON", name);
    };
  });
}

}  // namespace

void add_train_command(CLI::App& app, const std::vector<std::string>&, Command& chosen) {
  add_missing(app, "train", chosen);
}
void add_generate_command(CLI::App& app, Command& chosen) { add_missing(app, "generate", chosen); }
void add_checkpoint_command(CLI::App& app, Command& chosen) {
  add_missing(app, "checkpoint", chosen);
}

}  // namespace dynmo::app
