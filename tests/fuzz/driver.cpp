// SPDX-License-Identifier: Apache-2.0
// Drives a target (target.h) with changed seeds, the same ones for the same --seed. An input that
// was taken joins the inputs that are changed further. What kills or fails the target is written to
// a file, which the same program runs again:
//
//   fuzz_profile --executions 1000000 --seed 1
//   fuzz_profile FILE...

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>

#include "dynmo/core/files.h"
#include "tests/fuzz/mutate.h"
#include "tests/fuzz/target.h"

// Sanitizers end the program by the signal that keeps the input, too.
extern "C" const char* __asan_default_options();   // NOLINT
extern "C" const char* __asan_default_options() {  // NOLINT
  return "abort_on_error=1:handle_abort=0:handle_segv=0:handle_sigfpe=0:max_allocation_size_mb="
         "2048";
}
extern "C" const char* __ubsan_default_options();   // NOLINT
extern "C" const char* __ubsan_default_options() {  // NOLINT
  return "halt_on_error=1:abort_on_error=1:print_stacktrace=1";
}

namespace dynmo::fuzz {
namespace {

constexpr int kSecondsAnInput = 20;  // of the processor: another program may stop this one
constexpr std::size_t kMaxInputs = 512;

struct Flags {
  std::uint64_t executions = 20000;
  std::uint64_t seed = 1;
  std::vector<std::string> files;
};

// The signal handler needs these; nothing else may be touched there.
std::string current_input;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)
std::string finding_path;   // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

void keep_input() {
  const int file = ::open(finding_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (file < 0) return;
  [[maybe_unused]] const auto written = ::write(file, current_input.data(), current_input.size());
  ::close(file);
}

void on_signal(int number) {
  keep_input();
  std::signal(number, SIG_DFL);
  std::raise(number);
}

void catch_signals() {
  for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGPROF}) {
    std::signal(number, on_signal);
  }
#ifndef __SANITIZE_ADDRESS__
  const rlimit limit{std::uint64_t{2} << 30, std::uint64_t{2} << 30};  // bytes of address space
  ::setrlimit(RLIMIT_AS, &limit);
#endif
}

// 0: no limit.
void limit_seconds(int seconds) {
  const itimerval limit{.it_interval = {}, .it_value = {.tv_sec = seconds, .tv_usec = 0}};
  ::setitimer(ITIMER_PROF, &limit, nullptr);
}

// False: a finding, which has been reported.
bool execute(std::string input, bool& taken) {
  current_input = std::move(input);
  limit_seconds(kSecondsAnInput);
  try {
    taken = run_target(current_input) == Outcome::kTaken;
  } catch (const std::exception& fault) {
    keep_input();
    fmt::print(stderr, "fuzz: {}\nfuzz: the input is in {}\n", fault.what(), finding_path);
    return false;
  }
  limit_seconds(0);
  return true;
}

int run_files(const std::vector<std::string>& files) {
  for (const std::string& file : files) {
    auto text = read_file(file);
    bool taken = false;
    if (!text) return fmt::print(stderr, "fuzz: {}\n", text.error().message), 2;
    if (!execute(std::move(*text), taken)) return 1;
    fmt::print("{}: {}\n", file, taken ? "taken" : "refused");
  }
  return 0;
}

int run_seeds(const std::string& name, const Flags& flags) {
  std::vector<std::string> inputs = seeds();
  for (const std::string& seed : inputs) {
    bool taken = false;
    if (!execute(seed, taken)) return 1;
    if (!taken) return fmt::print(stderr, "fuzz: a seed is refused: {}\n", seed), 1;
  }
  const std::size_t kept_seeds = inputs.size();
  Rng rng(mix_key({flags.seed}));
  std::uint64_t all_taken = 0;
  for (std::uint64_t i = 0; i < flags.executions; ++i) {
    const std::size_t among = rng.below(2) == 0 ? kept_seeds : inputs.size();
    const std::string& base = inputs[static_cast<std::size_t>(rng.below(among))];
    const std::string& other = inputs[static_cast<std::size_t>(rng.below(inputs.size()))];
    bool taken = false;
    if (!execute(mutate(base, other, rng), taken)) {
      return fmt::print(stderr, "fuzz: execution {} of --seed {}\n", i, flags.seed), 1;
    }
    if (!taken) continue;
    ++all_taken;
    if (inputs.size() < kMaxInputs) {
      inputs.push_back(current_input);
    } else {
      inputs[kept_seeds + static_cast<std::size_t>(rng.below(inputs.size() - kept_seeds))] =
          current_input;
    }
  }
  fmt::print("{}: {} executions, {} taken, no finding (seed {})\n", name, flags.executions,
             all_taken, flags.seed);
  return 0;
}

int run(int argc, char** argv) {
  CLI::App app("Feeds a reader of DynMo with damaged input");
  Flags flags;
  app.add_option("--executions", flags.executions, "Inputs to try")->capture_default_str();
  app.add_option("--seed", flags.seed, "Of all choices")->capture_default_str();
  app.add_option("files", flags.files, "Run these inputs instead, once each");
  CLI11_PARSE(app, argc, argv);
  const std::string name = std::filesystem::path(argv[0]).filename().string();
  finding_path = fmt::format("{}-finding-{}", name, flags.seed);
  catch_signals();
  return flags.files.empty() ? run_seeds(name, flags) : run_files(flags.files);
}

}  // namespace
}  // namespace dynmo::fuzz

int main(int argc, char** argv) {
  try {
    return dynmo::fuzz::run(argc, argv);
  } catch (const std::exception& fault) {
    fmt::print(stderr, "fuzz: {}\n", fault.what());
    return 1;
  }
}
