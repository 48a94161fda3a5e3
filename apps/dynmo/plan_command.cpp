// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <variant>

#include "apps/dynmo/command.h"
#include "apps/dynmo/terminal.h"
#include "dynmo/config/config.h"
#include "dynmo/core/files.h"
#include "dynmo/data/dataset.h"
#include "dynmo/observe/plan_report.h"
#include "dynmo/observe/trace.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/question/asked.h"
#include "dynmo/plan/question/emit.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/lowering.h"

namespace dynmo::app {
namespace {

struct PlanFlags {
  plan::Asked asked;
  std::optional<std::string> out;
  std::optional<std::string> trace;
  std::optional<std::string> emit_to;
  bool json = false;
};

// The vocabulary of the config's decoder, as a training finds it.
Expected<std::int64_t> vocabulary_of(const config::Config& config, const std::string& path) {
  if (config.model.shape.vocabulary > 0) return config.model.shape.vocabulary;
  if (config.data.vocabulary > 0) return config.data.vocabulary;
  if (config.data.path.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "{}: model.vocabulary is 0, that of the data, and data.path is not set: "
                      "wanted one of them",
                      path);
  }
  DYNMO_ASSIGN(const data::DatasetDescription data, data::read_description(config.data.path));
  return data.vocabulary;
}

// Takes from a training's config what the flags left open.
Expected<void> take_config(plan::Asked& asked) {
  // question_of() refuses the other costs, or the lack of a device.
  if (!asked.config || asked.profile || asked.model || !asked.device) return {};
  config::Config config;
  DYNMO_TRY(config::apply_file(config, *asked.config));
  const auto valid = config::validate(config);
  if (!valid) {
    return make_error(ErrorCode::kBadInput, "{}: {}", *asked.config, valid.error().message);
  }
  if (!asked.cluster && !asked.ranks) {
    if (config.pipeline.ranks == 0) {
      return make_error(ErrorCode::kBadInput,
                        "{}: pipeline.ranks is 0, the usable cores of a host: wanted --ranks N or "
                        "--cluster CLUSTER.json",
                        *asked.config);
    }
    asked.ranks = config.pipeline.ranks;
  }
  if (!asked.memory && !asked.cluster && config.pipeline.memory > Bytes{0}) {
    asked.memory = fmt::format("{}", config.pipeline.memory.value);
  }
  const auto take = [](auto& flag, const auto& value) {
    if (!flag) flag = value;
  };
  take(asked.micro_batches, config.batch.micro_batches);
  take(asked.balancer, config.pipeline.balancer);
  take(asked.schedule, config.pipeline.schedule);
  take(asked.recompute, config.pipeline.recompute);
  asked.stages_per_rank = config.pipeline.stages_per_rank;
  DYNMO_ASSIGN(const std::int64_t vocabulary, vocabulary_of(config, *asked.config));
  asked.shape = config::transformer_shape(config, vocabulary);
  asked.bytes_per_element = config.model.precision == "bf16" ? 2 : 4;
  return {};
}

// The plan in force. One whose order cannot run is shown with the place where it stops.
Expected<void> read_from(const std::string& path, plan::Question& question) {
  DYNMO_ASSIGN(const plan::Plan from, plan::read_plan(path));
  auto set = plan::set_from(question, from, path);
  if (!set) {
    const auto broken = plan::broken_order(from, question);
    if (broken) print_error_text(schedule::explain(*broken) + "\n");
  }
  return set;
}

// Reads the question. Returns kBadInput with the flag or the file.
Expected<plan::Question> read_question(const PlanFlags& flags) {
  plan::Asked asked = flags.asked;
  if (flags.emit_to && !asked.form) {
    return make_error(ErrorCode::kBadInput, "--emit-to goes with --emit");
  }
  DYNMO_TRY(take_config(asked));
  DYNMO_ASSIGN(plan::Question question, plan::question_of(asked, plan::Spelling::kFlag));
  DYNMO_TRY(plan::check_effects(flags.asked, question, plan::Spelling::kFlag));
  if (asked.from) DYNMO_TRY(read_from(*asked.from, question));
  return question;
}

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
  return fmt::format("\n{:<16}{}: {}\n", *flags.asked.form, fmt::join(paths, ", "), emitted.note);
}

Expected<void> check_files(const PlanFlags& flags) {
  const auto path = [](const std::optional<std::string>& given) { return given.value_or(""); };
  std::vector<UsedFile> written = {{"--trace", path(flags.trace)}};
  const auto form = plan::parse_emit_form(path(flags.asked.form));
  if (form) {  // read_question() refuses any other
    for (const std::string_view name : plan::emitted_names(*form)) {
      written.push_back({"--emit", emitted_path(flags, name)});
    }
  }
  std::vector<UsedFile> all = {{"PROFILE", path(flags.asked.profile)},
                               {"--model", path(flags.asked.model)},
                               {"--config", path(flags.asked.config)},
                               {"--cluster", path(flags.asked.cluster)},
                               {"--out", path(flags.out)}};
  all.insert(all.end(), written.begin(), written.end());
  DYNMO_TRY(check_one_use(all));
  // The new plan may replace the old one.
  written.insert(written.begin(), {"--from", path(flags.asked.from)});
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

// Plans and prints the answer. With --json, also prints an error on standard output, for the
// program that reads it.
Expected<int> run_plan_command(const PlanFlags& flags) {
  auto done = run_plan(flags);
  if (!done && flags.json) fmt::print("{}\n", Json{{"error", done.error().message}}.dump());
  return done;
}

void add_question_options(CLI::App& command, plan::Asked& asked) {
  for (const plan::Option& option : plan::options_of(asked)) {
    const std::string flag(option.flag);
    const auto add = [&](auto* value) {
      if constexpr (std::is_same_v<decltype(value), bool*>) {
        return command.add_flag(flag, *value, option.help);
      } else {
        return command.add_option(flag, *value, option.help);
      }
    };
    CLI::Option* added = std::visit(add, option.value);
    if (!option.shown.empty()) added->default_str(std::string(option.shown));
    if (!option.placeholder.empty()) added->option_text(std::string(option.placeholder));
  }
}

}  // namespace

void add_plan_command(CLI::App& app, Command& chosen) {
  CLI::App* command =
      app.add_subcommand("plan", "Plan which rank runs which layers, and in which order");
  const auto flags = std::make_shared<PlanFlags>();
  add_question_options(*command, flags->asked);
  command->add_option("--out", flags->out, "Write the plan")->option_text("PLAN.json");
  command->add_option("--trace", flags->trace, "Write the step for Perfetto")
      ->option_text("TRACE.json");
  command->add_option("--emit-to", flags->emit_to, "The folder for --emit; default this one")
      ->option_text("FOLDER");
  command->add_flag("--json", flags->json, "Print the plan as JSON and nothing else");
  run_when_parsed(command, chosen, flags, run_plan_command);
}

}  // namespace dynmo::app
