// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>

#include "apps/dynmo/command.h"
#include "apps/dynmo/plan_question.h"
#include "apps/dynmo/terminal.h"
#include "dynmo/core/files.h"
#include "dynmo/observe/plan_report.h"
#include "dynmo/observe/trace.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/question/emit.h"
#include "dynmo/plan/question/question.h"

namespace dynmo::app {
namespace {

Expected<void> write_trace(const std::string& path, const plan::Evaluation& evaluation) {
  const std::vector<observe::TraceProcess> processes = {
      {.name = "planned",
       .steps = {
           {.timeline = evaluation.result.timeline, .duration = evaluation.result.step_time}}}};
  return write_file_durably(path, observe::trace_json(processes));
}

std::string folder_of(const PlanFlags& flags) { return flags.emit_to.value_or("."); }

std::string emitted_path(const PlanFlags& flags, std::string_view name) {
  return (std::filesystem::path(folder_of(flags)) / name).lexically_normal().string();
}

// Writes the files of --emit. Returns none without it.
Expected<std::optional<plan::Emitted>> emitted_by(const PlanFlags& flags,
                                                  const plan::Question& question,
                                                  const plan::Answer& answer) {
  if (!question.form) return std::optional<plan::Emitted>();
  const std::string folder = folder_of(flags);
  DYNMO_ASSIGN(plan::Emitted emitted,
               plan::emit(*question.form, plan::emit_problem(question, answer), folder));
  DYNMO_TRY(plan::write_emitted(emitted, folder));
  return std::optional(std::move(emitted));
}

std::string emitted_line(const plan::Emitted& emitted, const PlanFlags& flags) {
  std::vector<std::string> paths;
  for (const plan::EmittedFile& file : emitted.files) {
    paths.push_back(emitted_path(flags, file.name));
  }
  return fmt::format("\n{:<16}{}: {}\n", *flags.emit, fmt::join(paths, ", "), emitted.note);
}

Expected<void> check_files(const PlanFlags& flags) {
  const auto path = [](const std::optional<std::string>& given) { return given.value_or(""); };
  std::vector<UsedFile> written = {{"--trace", path(flags.trace)}};
  const auto form = plan::parse_emit_form(path(flags.emit));
  if (form) {  // read_question() refuses any other
    for (const std::string_view name : plan::emitted_names(*form)) {
      written.push_back({"--emit", emitted_path(flags, name)});
    }
  }
  std::vector<UsedFile> all = {{"PROFILE", path(flags.profile)},
                               {"--model", path(flags.model)},
                               {"--config", path(flags.config)},
                               {"--cluster", path(flags.cluster)},
                               {"--out", path(flags.out)}};
  all.insert(all.end(), written.begin(), written.end());
  DYNMO_TRY(check_one_use(all));
  // The new plan may replace the old one.
  written.insert(written.begin(), {"--from", path(flags.from)});
  return check_one_use(written);
}

Expected<int> run_plan(const PlanFlags& flags) {
  DYNMO_TRY(check_files(flags));
  DYNMO_ASSIGN(const plan::Question question, read_question(flags));
  StatusLine line;
  if (question.balancer == plan::Balancer::kSearch) line.show("searching for a plan ...");
  DYNMO_ASSIGN(const plan::Answer given, plan::answer(question));
  line.clear();
  const Json& json = given.document;
  if (flags.out) DYNMO_TRY(write_file_durably(*flags.out, json.dump(1) + "\n"));
  if (flags.trace) DYNMO_TRY(write_trace(*flags.trace, given.evaluation));
  DYNMO_ASSIGN(const auto emitted, emitted_by(flags, question, given));
  if (flags.json) {
    fmt::print("{}\n", json.dump(1));
    return 0;
  }
  fmt::print("{}",
             observe::plan_report(observe::report_of(question, given),
                                  {.width = terminal_width(), .ascii = !terminal_has_utf8()}));
  if (emitted) fmt::print("{}", emitted_line(*emitted, flags));
  return 0;
}

// With --json prints an error on standard output, too, for the program that reads it.
Expected<int> run_plan_command(const PlanFlags& flags) {
  auto done = run_plan(flags);
  if (!done && flags.json) fmt::print("{}\n", Json{{"error", done.error().message}}.dump());
  return done;
}

void add_model_options(CLI::App& command, PlanFlags& flags) {
  command
      .add_option("profile", flags.profile, "Costs of every layer, as `dynmo train` writes them")
      ->option_text("PROFILE.json");
  command.add_option("--model", flags.model, "Instead: a Hugging Face config.json or its folder")
      ->option_text("CONFIG.json");
  command
      .add_option("--config", flags.config,
                  "Instead: the config of a training; its ranks, schedule, balancer, memory and "
                  "micro-batches hold where no flag says otherwise")
      ->option_text("RUN.toml");
  command.add_option("--device", flags.device,
                     "What --model or --config runs on: h200, h100, a100, cpu");
  command.add_option("--sequence", flags.sequence, "Tokens of a sequence, with --model");
  command.add_option("--micro-batch-size", flags.micro_batch_size,
                     "Sequences of a micro-batch, with --model; default 1");
  command.add_option("--head-slices", flags.head_slices,
                     "Layers that the head is cut into, with --model or --config; default 1");
  command.add_option("--tensor-parallel", flags.tensor_parallel,
                     "Devices of a rank, with --model; default 1. Each has a part of every matrix, "
                     "and ranks are in nodes of the device");
  command.add_option("--optimizer-shards", flags.optimizer_shards,
                     "Replicas that divide the optimizer's state, with --model; default 1");
  command.add_option("--ranks", flags.ranks,
                     "Equal ranks; with --device its links inside a node, else no latency and "
                     "unlimited bandwidth");
  command.add_option("--memory", flags.memory,
                     "Memory of each of --ranks, such as 80GiB; default unlimited, with --device "
                     "the device's");
  command.add_option(
      "--head-room", flags.head_room,
      "Share of every rank's memory to leave free; default 0.1 of a device's, else 0");
  command.add_option("--cluster", flags.cluster, "Instead of --ranks: ranks, nodes and links")
      ->option_text("CLUSTER.json");
}

std::vector<std::string_view> balancer_names() {
  std::vector<std::string_view> names;
  for (const plan::Balancer balancer : plan::balancers()) names.push_back(plan::name(balancer));
  return names;
}

std::vector<std::string_view> schedule_names() {
  std::vector<std::string_view> names;
  for (const auto& kind : schedule::schedule_kinds()) names.push_back(kind.name);
  return names;
}

std::vector<std::string_view> emit_form_names() {
  std::vector<std::string_view> names;
  for (const plan::EmitForm form : plan::emit_forms()) names.push_back(plan::name(form));
  return names;
}

void add_plan_options(CLI::App& command, PlanFlags& flags) {
  command.add_option("--granularity", flags.granularity,
                     "What moves on its own: half (attention, MLP, slices of the head) or block; "
                     "default block with --emit torchtitan or megatron, else half");
  command.add_option("--micro-batches", flags.micro_batches, "Micro-batches of a step")
      ->default_str(std::to_string(kMicroBatches));
  command
      .add_option("--balancer", flags.balancer,
                  fmt::format("{}", fmt::join(balancer_names(), ", ")))
      ->default_str(kBalancer);
  command
      .add_option("--schedule", flags.schedule,
                  fmt::format("{}, or auto for the best", fmt::join(schedule_names(), ", ")))
      ->default_str(kSchedule);
  command.add_option(
      "--recompute", flags.recompute,
      "Layers that run forward again instead of keeping activations: none, whole (all), "
      "or auto: as few as the memory asks for; default auto with --model, else none");
  command.add_option("--from", flags.from, "The plan in force: what moves, and what it gains")
      ->option_text("PLAN.json");
  command.add_flag("--place", flags.place,
                   "Let ranks take any position, so that neighbours share nodes and the step is "
                   "shortest; without it they keep the order of the cluster");
  command.add_flag("--pack", flags.pack, "Use as few ranks as the step time allows");
  command.add_option("--slack", flags.slack,
                     "With --pack: how much longer a step may take, 0.05 for 5 %; default 0");
  command.add_option("--evaluations", flags.evaluations, "Effort of the search; default about 1 s");
}

}  // namespace

void add_plan_command(CLI::App& app, Command& chosen) {
  CLI::App* command =
      app.add_subcommand("plan", "Plan which rank runs which layers, and in which order");
  const auto flags = std::make_shared<PlanFlags>();
  add_model_options(*command, *flags);
  add_plan_options(*command, *flags);
  command->add_option("--out", flags->out, "Write the plan")->option_text("PLAN.json");
  command->add_option("--trace", flags->trace, "Write the step for Perfetto")
      ->option_text("TRACE.json");
  command
      ->add_option("--emit", flags->emit,
                   fmt::format("Write the plan for others, and find one that they can say: {}",
                               fmt::join(emit_form_names(), ", ")))
      ->option_text("FORM");
  command->add_option("--emit-to", flags->emit_to, "The folder for --emit; default this one")
      ->option_text("FOLDER");
  command->add_flag("--json", flags->json, "Print the plan as JSON and nothing else");
  run_when_parsed(command, chosen, flags, run_plan_command);
}

}  // namespace dynmo::app
