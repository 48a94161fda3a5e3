// SPDX-License-Identifier: Apache-2.0
#pragma once

// The commands of `dynmo-runtime` as `dynmo` lists them.

#include <CLI/App.hpp>
#include <array>

#include "apps/dynmo/command.h"

namespace dynmo::app {

struct RuntimeCommand {
  const char* name;
  const char* summary;
};
inline constexpr RuntimeCommand kTrainCommand = {
    "train",
    "Train a language model on a pipeline of ranks; joins those that torchrun, mpirun or srun "
    "started, else starts them"};
inline constexpr RuntimeCommand kGenerateCommand = {"generate",
                                                    "Continue a text with a trained model"};
inline constexpr RuntimeCommand kCheckpointCommand = {
    "checkpoint", "Inspect, verify, export or import checkpoints"};
inline constexpr std::array kRuntimeCommands = {kTrainCommand, kGenerateCommand,
                                                kCheckpointCommand};

// Adds the commands. Each replaces this process by `dynmo-runtime` with the same arguments, so that
// process id, signals and descriptors stay those of `dynmo`. Returns kBadInput if that program is
// not installed.
void add_runtime_commands(CLI::App& app, char** argv, Command& chosen);

}  // namespace dynmo::app
