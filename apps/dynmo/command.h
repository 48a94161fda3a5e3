// SPDX-License-Identifier: Apache-2.0
#pragma once

// The interface between subcommands and main. Each `add_..._command(app, chosen)` adds its options
// to `app`. Its callback sets `chosen` while CLI11 parses, and main runs it afterwards. Nothing is
// done before all flags are read. Only main converts errors into messages and exit codes.

#include <CLI/App.hpp>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"

namespace dynmo {
extern const std::string_view kVersion;  // with the commit (cmake/write_version.cmake)
}

namespace dynmo::app {

// Returns version, commit, compiler and libtorch of this build, and processor and system of this
// machine, for `dynmo --version --json`. A report of a defect needs them. A value that is not known
// is null.
[[nodiscard]] Json version_report();

// Runs a command whose flags are parsed. Returns its exit code (listed in core/expected.h), or the
// error that main prints.
using Command = std::function<Expected<int>()>;

// Sets `chosen` to a call of `run(*flags)` when `command` is parsed. The program then makes that
// call.
template <typename Flags, typename Run>
void run_when_parsed(CLI::App* command, Command& chosen, std::shared_ptr<Flags> flags, Run run) {
  command->callback([flags, run, &chosen] { chosen = [flags, run] { return run(*flags); }; });
}

// A file that a command reads or writes, and the flag that names it. An empty path is none.
struct UsedFile {
  std::string_view flag;
  std::string path;
};

// Returns kBadInput if two of the files are one, so that no input is overwritten.
[[nodiscard]] Expected<void> check_one_use(const std::vector<UsedFile>& files);

// Returns an error text for a negative number, else "". Checks unsigned options, because CLI11
// reads -1 as the largest number.
inline std::string not_negative(const std::string& text) {
  return text.starts_with('-') ? text + " is below 0, wanted a whole number of at least 0" : "";
}

// Adds `dynmo data prepare PATH... --out DIR`.
void add_data_command(CLI::App& app, Command& chosen);
// Adds `dynmo plan (PROFILE.json | --model CONFIG.json ...) (--ranks N | --cluster CLUSTER.json)`.
void add_plan_command(CLI::App& app, Command& chosen);
// Adds `dynmo simulate SCENARIO.toml`, which compares policies over a whole training run, without a
// GPU.
void add_simulate_command(CLI::App& app, Command& chosen);
// Adds `dynmo config [FILE]`: the keys of a training, as a run saves them.
void add_config_command(CLI::App& app, Command& chosen);
// Adds `dynmo ctl`, which queries and controls an active run (docs/elasticity.md).
void add_ctl_command(CLI::App& app, Command& chosen);
// Adds `dynmo report RUN`: the final report of a run, its layers and its traffic.
void add_report_command(CLI::App& app, Command& chosen);
// Adds `dynmo trace import TRACE.json... --out PROFILE.json`.
void add_trace_command(CLI::App& app, Command& chosen);
// Adds `dynmo trace stats`: features of loads.
void add_stats_command(CLI::App& trace, Command& chosen);
// Adds `dynmo trace gen`: loads of given features.
void add_gen_command(CLI::App& trace, Command& chosen);
// Adds `dynmo train`, which starts the ranks of a run, or is one of them. `arguments` is main's
// argv.
void add_train_command(CLI::App& app, const std::vector<std::string>& arguments, Command& chosen);
// Adds `dynmo generate RUN|CHECKPOINT --prompt TEXT`.
void add_generate_command(CLI::App& app, Command& chosen);
// Adds `dynmo checkpoint inspect | verify | export-hf`.
void add_checkpoint_command(CLI::App& app, Command& chosen);

// Runs the body of main in both programs. `dynmo` has the commands that need no libtorch, and
// starts at once. For the others it becomes `dynmo-runtime`, which loads libtorch. Parses the flags
// of the commands that `add_commands` adds, runs the chosen one and returns the exit code. Prints
// every error as one line.
[[nodiscard]] int run_program(int argc, char** argv,
                              const std::function<void(CLI::App&, Command&)>& add_commands);

// The commands of `dynmo-runtime` as `dynmo` lists them.
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
