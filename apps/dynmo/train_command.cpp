// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/train_command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>

#include "dynmo/runtime/c10d_transport.h"
#include "dynmo/train/rank_process.h"

namespace dynmo::app {
namespace {

struct TrainFlags {
  std::string config;
  std::vector<std::string> settings;
  std::optional<std::int64_t> ranks;
  std::optional<std::int64_t> steps;
  std::string data;
  std::optional<std::string> out;
  std::vector<std::string> compare;
  bool resume = false;
  bool dry_run = false;
};

// File first, then --set, then the flags that have names of their own.
Expected<train::TrainOptions> options_of(const TrainFlags& flags) {
  train::TrainOptions options;
  if (!flags.config.empty()) DYNMO_TRY(train::apply_file(options.config, flags.config));
  DYNMO_TRY(train::apply_settings(options.config, flags.settings));
  if (flags.ranks) options.config.pipeline.ranks = *flags.ranks;
  if (flags.ranks && *flags.ranks < 1) {
    return make_error(ErrorCode::kBadInput, "-n is {}, wanted 1 rank or more", *flags.ranks);
  }
  if (flags.steps) options.config.train.steps = *flags.steps;
  if (!flags.data.empty()) options.config.data.path = flags.data;
  if (flags.out) options.config.run.directory = *flags.out;
  options.compare = flags.compare;
  options.resume = flags.resume;
  return options;
}

// On a terminal the progress is one line that is written over; elsewhere a line now and then.
train::Reporter terminal_reporter(std::int64_t steps) {
  const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  const std::int64_t every = std::max<std::int64_t>(1, steps / 20);
  train::Reporter reporter;
  reporter.line = [terminal](std::string_view text) {
    fmt::print("{}{}\n", terminal ? "\r\033[K" : "", text);
    std::fflush(stdout);
  };
  reporter.progress = [terminal, every, calls = std::int64_t{0}](std::string_view text) mutable {
    ++calls;
    if (!terminal && calls % every != 0) return;
    fmt::print("{}{}{}", terminal ? "\r\033[K" : "", text, terminal ? "" : "\n");
    std::fflush(stdout);
  };
  return reporter;
}

[[noreturn]] void be_a_rank(train::TrainOptions options) {
  const std::int64_t steps = options.config.train.steps;
  const auto done =
      train::run_rank({.options = std::move(options), .reporter = terminal_reporter(steps)});
  if (done.has_value()) runtime::quit(0);
  fmt::print(stderr, "dynmo: error: {}\n", done.error().message);
  runtime::quit(exit_code(done.error().code));
}

Expected<int> run_train(const TrainFlags& flags, const std::vector<std::string>& arguments) {
  DYNMO_ASSIGN(train::TrainOptions options, options_of(flags));
  if (flags.dry_run) {
    DYNMO_ASSIGN(const std::string text, train::say_dry_run(options));
    fmt::print("{}", text);
    return 0;
  }
  DYNMO_ASSIGN(const bool rank, train::is_rank_process());
  if (rank) be_a_rank(std::move(options));
  std::vector<std::string> command = arguments;
  std::error_code fault;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", fault);
  if (!fault) command[0] = self.string();
  return train::launch(options, command);
}

}  // namespace

void add_train_command(CLI::App& app, const std::vector<std::string>& arguments, Command& chosen) {
  CLI::App* command =
      app.add_subcommand("train",
                         "Train a language model on a pipeline of ranks; joins those that "
                         "torchrun, mpirun or srun started, else starts them");
  const auto flags = std::make_shared<TrainFlags>();
  command->add_option("-c,--config", flags->config, "TOML file; defaults for all it leaves out");
  command->add_option("--set", flags->settings, "Change one key, such as --set train.steps=100")
      ->option_text("KEY=VALUE")
      ->take_all();
  command->add_option("-n,--ranks", flags->ranks,
                      "Ranks to start for each replica; default min(4, usable cores)");
  command->add_option("--steps", flags->steps, "Same as --set train.steps=N");
  command->add_option("--data", flags->data, "Folder made by `dynmo data prepare`");
  command->add_option("--out", flags->out,
                      "Folder of the run: records, trace, checkpoints, summary");
  command
      ->add_option("--compare", flags->compare,
                   "Advance several runs in turn: static (the first plan, kept), balanced")
      ->delimiter(',');
  command->add_flag("--resume", flags->resume, "Continue from the newest checkpoint in --out");
  command->add_flag("--dry-run", flags->dry_run,
                    "Print plan, memory of each rank and predicted step time; start nothing");
  command->callback([flags, arguments, &chosen] {
    chosen = [flags, arguments] { return run_train(*flags, arguments); };
  });
}

}  // namespace dynmo::app
