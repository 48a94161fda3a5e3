// SPDX-License-Identifier: Apache-2.0
// Stands in for train_command.cpp where DynMo is built without its runtime.
#include "apps/dynmo/train_command.h"

namespace dynmo::app {

void add_train_command(CLI::App& app, const std::vector<std::string>&, Command& chosen) {
  CLI::App* command = app.add_subcommand("train", "(this build is without the runtime)");
  command->allow_extras();
  command->callback([&chosen] {
    chosen = []() -> Expected<int> {
      return make_error(ErrorCode::kBadInput,
                        "dynmo train: this build is without the runtime; configure with "
                        "-DDYNMO_RUNTIME=ON");
    };
  });
}

}  // namespace dynmo::app
