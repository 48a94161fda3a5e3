// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>

#include "apps/dynmo/command.h"
#include "apps/dynmo/terminal.h"
#include "dynmo/core/effects.h"
#include "dynmo/core/files.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/core/units.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/scenario/report.h"
#include "dynmo/scenario/run.h"

namespace dynmo::app {
namespace {

constexpr std::int64_t kTraceSteps = 3;

struct SimulateFlags {
  std::string scenario;
  std::vector<std::string> settings;
  std::vector<std::string> compare;
  std::string trace;
  std::string load_trace;
  bool json = false;
  bool decisions = false;
  bool shares = false;
};

// Shows progress on standard error: a bar on a terminal, and a line for each finished policy. So
// users see which policy takes the time.
class PolicyProgress {
 public:
  void show(const scenario::ComparisonProgress& progress) {
    if (progress.step == 0) {
      finish();
      run_ = progress.run;
      began_ = Clock::now();
    }
    if (line_.is_due()) line_.show(bar_of(progress));
  }
  void finish() {
    if (run_.empty()) return;
    line_.clear();
    print_note("{} took {}", run_, format_seconds(seconds_since(began_)));
    run_.clear();
  }

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] std::string bar_of(const scenario::ComparisonProgress& progress) const {
    constexpr int kWidth = 30;
    const double done = (progress.number +
                         static_cast<double>(progress.step) / static_cast<double>(progress.steps)) /
                        progress.runs;
    const auto filled = static_cast<std::size_t>(done * kWidth);
    return fmt::format("[{}{}] {:3.0f} % {}, step {} of {}, {:.0f} s", std::string(filled, '#'),
                       std::string(kWidth - filled, ' '), 100 * done, progress.run, progress.step,
                       progress.steps, seconds_since(began_));
  }

  StatusLine line_;
  std::string run_;
  Clock::time_point began_;
};

Expected<scenario::Comparison> compare(const scenario::Scenario& asked,
                                       const SimulateFlags& flags) {
  DYNMO_ASSIGN(const scenario::Job job, scenario::make_job(asked));
  const std::string idle = scenario::idle_source(asked);
  if (!idle.empty()) print_note("{}", idle);
  if (!flags.load_trace.empty()) {
    DYNMO_TRY(dynamism::record(*job.load, asked.training.steps, asked.training.sample_every,
                               flags.load_trace));
  }
  PolicyProgress shown;
  auto compared = scenario::compare(
      job, asked.policy.compare,
      {.trace_steps = flags.trace.empty() ? 0 : kTraceSteps,
       .shares = flags.shares,
       .progress = [&](const scenario::ComparisonProgress& progress) { shown.show(progress); }});
  if (compared) shown.finish();
  return compared;
}

Expected<void> check_effects(const SimulateFlags& flags, const scenario::Scenario& asked) {
  const bool replans = scenario::replans(asked);
  const std::string_view wanted = "a policy that re-plans, such as --compare optimal,";
  return check_flags({
      {"--shares", flags.shares, replans, wanted},
      {"--decisions", flags.decisions, replans, wanted},
      {"--decisions", flags.decisions, !flags.json, "no --json, which has them,"},
  });
}

Expected<int> run_simulate(const SimulateFlags& flags) {
  DYNMO_ASSIGN(const scenario::Scenario asked,
               scenario::read_scenario(flags.scenario, flags.settings, flags.compare));
  DYNMO_TRY(check_effects(flags, asked));
  DYNMO_TRY(check_one_use({{"SCENARIO", flags.scenario},
                           {"model.config", asked.model.config},
                           {"model.profile", asked.model.profile},
                           {"dynamism.trace", asked.dynamism.trace},
                           {"--trace", flags.trace},
                           {"--load-trace", flags.load_trace}}));
  DYNMO_ASSIGN(const scenario::Comparison comparison, compare(asked, flags));
  if (!flags.trace.empty()) {
    DYNMO_TRY(write_file_durably(flags.trace, observe::trace_json(scenario::trace_of(comparison))));
  }
  if (flags.json) {
    fmt::print("{}\n", scenario::comparison_json(asked, comparison).dump(2));
  } else {
    fmt::print("{}", scenario::report(asked, comparison));
    if (flags.decisions) fmt::print("{}", scenario::decisions_text(comparison));
  }
  return 0;
}

// Simulates and prints the comparison. With --json, also prints an error on standard output, for
// the program that reads it.
Expected<int> run_simulate_command(const SimulateFlags& flags) {
  auto done = run_simulate(flags);
  if (!done && flags.json) fmt::print("{}\n", Json{{"error", done.error().message}}.dump());
  return done;
}

}  // namespace

void add_simulate_command(CLI::App& app, Command& chosen) {
  CLI::App* command = app.add_subcommand(
      "simulate", "Compare policies over a training run whose costs change, without a GPU");
  const auto flags = std::make_shared<SimulateFlags>();
  command->add_option("scenario", flags->scenario, "TOML file; examples/scenarios has some")
      ->required()
      ->option_text("SCENARIO.toml");
  command->add_option("--set", flags->settings, "Change one key, such as --set training.steps=100")
      ->option_text("KEY=VALUE")
      ->take_all();
  command
      ->add_option("--compare", flags->compare,
                   "Policies, such as uniform,time,optimal; static:NAME keeps its first cut")
      ->delimiter(',');
  command->add_option("--trace", flags->trace, "Write the last steps of every run for Perfetto")
      ->option_text("TRACE.json");
  command
      ->add_option("--load-trace", flags->load_trace,
                   "Write the costs of its steps, for emulated.trace and dynamism.trace")
      ->option_text("LOADS.jsonl");
  command->add_flag("--json", flags->json, "Print the comparison as JSON and nothing else");
  command->add_flag("--decisions", flags->decisions,
                    "Print each decision with its reason, moves and refusals");
  command->add_flag("--shares", flags->shares,
                    "Print what re-planning has gained of what it can; makes a plan a step");
  run_when_parsed(command, chosen, flags, run_simulate_command);
}

}  // namespace dynmo::app
