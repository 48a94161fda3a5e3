// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include "apps/dynmo/command.h"
#include "apps/dynmo/terminal.h"
#include "dynmo/c10d/c10d_transport.h"
#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/effects.h"
#include "dynmo/core/files.h"
#include "dynmo/core/shell.h"
#include "dynmo/core/toml.h"
#include "dynmo/cost/files.h"
#include "dynmo/observe/progress.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/train/rank_process.h"
#include "dynmo/train/setup/earlier_run.h"

namespace dynmo::app {
namespace {

const int kInterruptedExit = exit_code(ErrorCode::kInterrupted);
const int kLostExit = exit_code(ErrorCode::kPeerLost);

struct TrainFlags {
  std::string config;
  std::vector<std::string> settings;  // of --set
  std::vector<std::string> keys;      // flags such as --train.steps 100, as settings
  std::optional<std::int64_t> ranks;
  std::optional<std::int64_t> steps;
  std::string data;
  std::optional<std::string> out;
  std::vector<std::string> compare;
  std::string resume = "never";  // or always, or auto
  bool overwrite = false;
  int restarts = 0;
  bool dry_run = false;
  std::string cluster;
  std::string join;
  std::string secret;
};

struct KeyFlag {
  std::string key;
  std::string value;
  std::string flag;  // for messages
};

// Returns the keys that flags with other names set.
std::vector<KeyFlag> key_flags(const TrainFlags& flags) {
  std::vector<KeyFlag> given;
  for (const std::string& setting : flags.keys) {
    const std::string key = setting.substr(0, setting.find('='));
    given.push_back({key, setting.substr(key.size() + 1), "--" + key});
  }
  if (flags.ranks) given.push_back({"pipeline.ranks", fmt::format("{}", *flags.ranks), "-n"});
  if (flags.steps) given.push_back({"train.steps", fmt::format("{}", *flags.steps), "--steps"});
  if (!flags.data.empty()) given.push_back({"data.path", flags.data, "--data"});
  if (flags.out) given.push_back({"run.directory", *flags.out, "--out"});
  return given;
}

// Returns kBadInput if two flags give one key different values. The last of several --set counts.
Expected<void> check_given_once(const TrainFlags& flags) {
  std::map<std::string, KeyFlag> seen;
  for (const std::string& setting : flags.settings) {
    const std::string key = setting.substr(0, setting.find('='));
    if (key.size() < setting.size()) {
      seen[key] = {key, setting.substr(key.size() + 1), "--set " + key};
    }
  }
  for (const KeyFlag& now : key_flags(flags)) {
    const auto [before, first] = seen.try_emplace(now.key, now);
    if (first || before->second.value == now.value ||
        before->second.value == fmt::format("\"{}\"", now.value)) {
      continue;
    }
    return make_error(ErrorCode::kBadInput,
                      "{} is {} and {} is {}, which are one key: wanted one of them",
                      before->second.flag, before->second.value, now.flag, now.value);
  }
  return {};
}

// Returns all flags of keys as settings. Paths are quoted, because one may look like a number.
std::vector<std::string> settings_of(const TrainFlags& flags) {
  std::vector<std::string> settings = flags.settings;
  settings.insert(settings.end(), flags.keys.begin(), flags.keys.end());
  const auto add = [&](const std::string& key, const std::string& value) {
    settings.push_back(fmt::format("{}={}", key, value));
  };
  if (flags.ranks) add("pipeline.ranks", std::to_string(*flags.ranks));
  if (flags.steps) add("train.steps", std::to_string(*flags.steps));
  std::string data = flags.data;
  std::string out = flags.out.value_or("");
  if (!data.empty()) add("data.path", toml_value(&data));
  if (flags.out) add("run.directory", toml_value(&out));
  return settings;
}

// Returns whether a flag sets the number of ranks.
bool gives_ranks(const TrainFlags& flags) {
  return std::ranges::any_of(settings_of(flags), [](const std::string& setting) {
    return setting.starts_with("pipeline.ranks=");
  });
}

// Returns the options from the file, changed by all flags.
Expected<train::TrainOptions> options_of(const TrainFlags& flags, const std::string& config_text) {
  train::TrainOptions options;
  DYNMO_TRY(config::apply_text(options.config, config_text, flags.config));
  DYNMO_TRY(check_given_once(flags));
  if (flags.ranks && *flags.ranks < 1) {
    return make_error(ErrorCode::kBadInput, "-n is {}, wanted 1 rank or more", *flags.ranks);
  }
  DYNMO_TRY(config::apply_settings(options.config, settings_of(flags)));
  options.program = fmt::format("dynmo {}", kVersion);
  options.compare = flags.compare;
  options.resume = flags.resume == "always";
  if (flags.resume == "auto") {
    DYNMO_ASSIGN(const auto found,
                 checkpoint::list_checkpoints(
                     observe::RunFolder(options.config.run.directory).checkpoints()));
    options.resume = !found.empty();
    options.overwrite = found.empty();  // a run without a checkpoint cannot be continued
  }
  if (flags.overwrite && flags.resume != "never") {
    return make_error(
        ErrorCode::kBadInput,
        "--overwrite with --resume: wanted one of them; --resume keeps what is there");
  }
  options.overwrite = options.overwrite || flags.overwrite;
  options.names = {.resume = "--resume",
                   .overwrite = "--overwrite",
                   .compare = "--compare",
                   .directory = "--out"};
  return options;
}

train::Reporter terminal_reporter() {
  using observe::Progress;
  const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  const auto shown =
      std::make_shared<Progress>(terminal ? Progress::On::kTerminal : Progress::On::kFile);
  const auto write = [](std::string_view text) {
    fmt::print("{}", text);
    std::fflush(stdout);
  };
  train::Reporter reporter;
  reporter.line = [shown, write](std::string_view text) { write(for_terminal(shown->line(text))); };
  reporter.progress = [shown, write](const train::Progress& step) {
    const Progress::Now now = {.clock = Progress::Clock::now(),
                               .time_of_day = time_of_day(),
                               .columns = columns_now(STDOUT_FILENO)};
    write(shown->step(step.done, step.steps, step.text, now));
  };
  return reporter;
}

// Returns "interrupted at step 120 of 1000; checkpoint of step 100; continue with: ...".
std::string describe(const train::Interruption& found, const train::TrainOptions& options) {
  std::string text = found.steps_done ? fmt::format("interrupted at step {} of {}",
                                                    *found.steps_done, options.config.train.steps)
                                      : "interrupted before a step was done";
  if (!options.compare.empty()) return text + "; a comparison starts at step 0 again";
  if (!found.checkpoint_step) {
    const std::int64_t every = options.config.checkpoint.every;
    return text + (every > 0 ? fmt::format("; no checkpoint to continue from: the first comes "
                                           "after {} steps (checkpoint.every)",
                                           every)
                             : "; no checkpoint to continue from (checkpoint.every = N writes "
                               "one)");
  }
  return text +
         fmt::format("; checkpoint of step {}; continue with: dynmo train --config {} --resume",
                     *found.checkpoint_step, shell_quote(found.config.string()));
}

[[noreturn]] void run_as_rank(train::TrainOptions options) {
  const auto done =
      train::run_rank({.options = std::move(options), .reporter = terminal_reporter()});
  if (done.has_value()) c10d::quit(0);
  // A requested stop is no error, and rank 0 has reported it.
  if (done.error().code == ErrorCode::kInterrupted) c10d::quit(kInterruptedExit);
  c10d::quit(print_error(done.error()));
}

// Returns the arguments without the flags that say how a run begins.
std::vector<std::string> without_beginning(const std::vector<std::string>& arguments) {
  std::vector<std::string> left;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& word = arguments[i];
    const bool has_value = i + 1 < arguments.size() && !arguments[i + 1].starts_with('-');
    if (word == "--overwrite" || word.starts_with("--resume=")) continue;
    if (word == "--resume") {
      i += has_value ? 1 : 0;
      continue;
    }
    left.push_back(word);
  }
  return left;
}

// Starts the ranks. After the loss of one, starts all of them again, up to the number of
// --restarts.
Expected<int> launch(TrainFlags flags, const std::string& config_text,
                     std::vector<std::string> command, train::TrainOptions& options) {
  const std::vector<std::string> late_command = {command.front(), std::string(kTrainCommand.name),
                                                 "--join", options.config.run.directory};
  for (int restart = 0;; ++restart) {
    DYNMO_ASSIGN(const int code, train::launch(options, command, late_command));
    if (code != kLostExit || restart == flags.restarts) return code;
    flags.resume = "auto";
    flags.overwrite = false;
    DYNMO_ASSIGN(options, options_of(flags, config_text));
    command = without_beginning(command);
    command.emplace_back("--resume=auto");
    print_note("restart {} of {}, {}", restart + 1, flags.restarts,
               options.resume ? "from the newest checkpoint"
                              : "from the beginning: there is no checkpoint yet");
  }
}

// Returns the arguments of the ranks. They read the config from a file in memory, which this
// process holds while it waits for them: a pipe can be read only once, and a file may change before
// a restart.
Expected<std::vector<std::string>> rank_arguments(std::vector<std::string> arguments,
                                                  const std::string& config,
                                                  const std::string& text) {
  std::error_code fault;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", fault);
  if (!fault) arguments[0] = self.string();
  if (config.empty()) return arguments;
  const int file = ::memfd_create("dynmo-config", MFD_CLOEXEC);
  if (file < 0) {
    return make_error(ErrorCode::kBadInput, "cannot hold '{}' in memory: {}", config,
                      std::strerror(errno));
  }
  DYNMO_TRY(write_file_durably(fmt::format("/proc/self/fd/{}", file), text));
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    std::string& argument = arguments[i];
    const bool value = arguments[i - 1] == "-c" || arguments[i - 1] == "--config";
    const bool both = argument.starts_with("-c") || argument.starts_with("--config=");
    if (!argument.ends_with(config) || (!value && !both)) continue;
    argument.resize(argument.size() - config.size());
    argument += fmt::format("/proc/{}/fd/{}", ::getpid(), file);
  }
  return arguments;
}

[[noreturn]] void join_as_rank(const TrainFlags& flags, const std::string& run) {
  train::RankProcess process;
  process.reporter = terminal_reporter();
  const auto done =
      train::join_run({.run = run, .secret_file = flags.secret, .data = flags.data}, process);
  if (done.has_value()) c10d::quit(0);
  if (done.error().code == ErrorCode::kInterrupted) {
    print_note("{}", done.error().message);
    c10d::quit(kInterruptedExit);
  }
  c10d::quit(print_error(done.error()));
}

Expected<int> run_train(const TrainFlags& flags, const std::vector<std::string>& arguments) {
  if (!flags.join.empty()) {
    const bool more = !flags.config.empty() || !flags.settings.empty() || !flags.keys.empty() ||
                      flags.ranks || flags.steps || flags.out || !flags.compare.empty() ||
                      flags.resume != "never" || flags.overwrite || flags.restarts != 0 ||
                      flags.dry_run || !flags.cluster.empty();
    if (more) {
      return make_error(ErrorCode::kBadInput,
                        "--join takes the settings of the run: wanted no other flags with it than "
                        "--data and --secret");
    }
    join_as_rank(flags, flags.join);
  }
  // A dry run accepts all flags of the run that it describes.
  DYNMO_TRY(check_flags({
      {"--secret", !flags.secret.empty(), false, "--join HOST:PORT"},
      {"--cluster", !flags.cluster.empty(), flags.dry_run, "--dry-run"},
  }));
  std::string config_text;
  if (!flags.config.empty()) {
    DYNMO_ASSIGN(config_text, read_file(flags.config, kMaxTomlBytes));
  }
  DYNMO_ASSIGN(train::TrainOptions options, options_of(flags, config_text));
  if (gives_ranks(flags)) DYNMO_TRY(train::check_asked_ranks(options.config));
  if (flags.dry_run) {
    std::optional<cost::Cluster> cluster;
    if (!flags.cluster.empty()) {
      DYNMO_ASSIGN(cluster, cost::read_cluster(flags.cluster));
    }
    DYNMO_ASSIGN(const std::string text, train::dry_run_text(options, cluster));
    fmt::print("{}", text);
    return 0;
  }
  DYNMO_ASSIGN(const bool rank, train::is_rank_process());
  if (rank && flags.restarts != 0 && std::getenv(train::kLockedByLauncher) == nullptr) {
    return make_error(ErrorCode::kBadInput,
                      "--restarts for ranks that somebody else has started (RANK is set): wanted "
                      "torchrun --max-restarts, or a restart by the scheduler, with --resume auto");
  }
  // A scheduler may restart a rank whose run has continued without it.
  const std::string& folder = options.config.run.directory;
  const bool starts_alone = rank && std::getenv(train::kLockedByLauncher) == nullptr;
  if (starts_alone && flags.resume == "auto" && train::run_goes_on(folder)) {
    join_as_rank(flags, folder);
  }
  if (rank) run_as_rank(std::move(options));
  if (flags.restarts != 0 && !flags.compare.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "--restarts with --compare: a comparison cannot continue from a checkpoint; "
                      "wanted one of them");
  }
  DYNMO_ASSIGN(const std::vector<std::string> command,
               rank_arguments(arguments, flags.config, config_text));
  const auto begin = std::filesystem::file_time_type::clock::now();
  DYNMO_ASSIGN(const int code, launch(flags, config_text, command, options));
  if (code == kInterruptedExit) {
    const train::Interruption found = train::find_interruption(options, begin);
    print_note("{}", describe(found, options));
  }
  return code;
}

// Adds a flag for each key. They are hidden from --help, which would be twice as long;
// docs/config.md lists them.
void add_key_flags(CLI::App& command, const std::shared_ptr<TrainFlags>& flags) {
  for (const std::string& name : config::key_names()) {
    const auto set = [flags, name](const std::string& value) {
      flags->keys.push_back(fmt::format("{}={}", name, value));
    };
    command.add_option_function<std::string>("--" + name, set)->group("");
  }
}

}  // namespace

void add_train_command(CLI::App& app, const std::vector<std::string>& arguments, Command& chosen) {
  CLI::App* command = app.add_subcommand(kTrainCommand.name, kTrainCommand.summary);
  const auto flags = std::make_shared<TrainFlags>();
  command->add_option("-c,--config", flags->config, "TOML file; defaults for all it leaves out");
  command
      ->add_option("--set", flags->settings,
                   "Change one key, such as --set train.steps=100; --train.steps 100 is the same")
      ->option_text("KEY=VALUE")
      ->take_all();
  add_key_flags(*command, flags);
  command->add_option("-n,--ranks", flags->ranks,
                      "Ranks to start for each replica; default min(4, usable cores)");
  command->add_option("--steps", flags->steps, "Same as --set train.steps=N");
  command->add_option("--data", flags->data, "Folder made by `dynmo data prepare`");
  command->add_option("--out", flags->out,
                      "Folder of the run: records, trace, checkpoints, summary");
  command
      ->add_option(
          "--compare", flags->compare,
          "Advance several runs in turn: dense (without what makes the model dynamic), static "
          "(the first plan, kept), balanced")
      ->delimiter(',');
  command
      ->add_option("--resume", flags->resume,
                   "Continue from the newest checkpoint in --out; --resume auto: start where there "
                   "is none")
      ->expected(0, 1)
      ->default_str("always")
      ->check(CLI::IsMember({"always", "auto"}))
      ->option_text("[auto]");
  command->add_flag("--overwrite", flags->overwrite,
                    "Remove an earlier run in --out first; otherwise that is an error");
  command
      ->add_option("--restarts", flags->restarts,
                   "Start all ranks again, from the newest checkpoint, after the loss of one: at "
                   "most N times")
      ->option_text("N")
      ->check(not_negative);
  command->add_option("--join", flags->join,
                      "Become a rank of a run that goes on: its folder, or HOST:PORT of its leader "
                      "(with --secret)");
  command->add_option("--secret", flags->secret, "With --join: file with the run's secret");
  command->add_flag("--dry-run", flags->dry_run,
                    "Print plan, memory of each rank and predicted step time; start nothing");
  command->add_option("--cluster", flags->cluster,
                      "With --dry-run: ranks, hosts and links, such as RUN/cluster.json of a run");
  command->callback([flags, arguments, &chosen] {
    chosen = [flags, arguments] { return run_train(*flags, arguments); };
  });
}

}  // namespace dynmo::app
