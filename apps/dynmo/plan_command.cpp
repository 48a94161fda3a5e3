// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/plan_command.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>

#include "apps/dynmo/terminal.h"
#include "dynmo/core/files.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/device.h"
#include "dynmo/cost/files.h"
#include "dynmo/cost/hugging_face.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/observe/plan_report.h"
#include "dynmo/observe/trace.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/pack.h"
#include "dynmo/plan/propose.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/csv.h"
#include "dynmo/schedule/lowering.h"

namespace dynmo::app {
namespace {

constexpr std::int64_t kMaxRanks = 1 << 16;

struct PlanFlags {
  std::optional<std::string> profile;
  std::optional<std::string> model;
  std::optional<std::string> device;
  std::optional<std::int64_t> sequence;
  std::optional<std::int64_t> micro_batch_size;
  std::optional<std::int64_t> head_slices;
  std::optional<std::int64_t> ranks;
  std::optional<std::string> memory;
  std::optional<std::string> cluster;
  std::optional<double> head_room;
  std::int64_t micro_batches = 32;
  std::string balancer = "search";
  std::string schedule = "auto";
  std::string recompute = "none";
  std::optional<std::string> from;
  bool pack = false;
  std::optional<double> slack;
  std::optional<std::int64_t> evaluations;
  std::optional<std::string> out;
  std::optional<std::string> trace;
  std::optional<std::string> schedule_csv;
  bool json = false;
};

Error wrong(std::string message) { return Error{ErrorCode::kBadInput, std::move(message)}; }

// Flags that exclude or want one another.
Expected<void> check_sources(const PlanFlags& flags) {
  if (flags.profile && flags.model) {
    return wrong("both PROFILE.json and --model were given, wanted one of them");
  }
  if (!flags.profile && !flags.model) {
    return wrong("no model was given, wanted PROFILE.json or --model CONFIG.json");
  }
  if (!flags.model &&
      (flags.device || flags.sequence || flags.micro_batch_size || flags.head_slices)) {
    return wrong(
        "--device, --sequence, --micro-batch-size and --head-slices go with --model, not with a "
        "profile");
  }
  if (flags.model && (!flags.device || !flags.sequence)) {
    return wrong("--model wants --device, such as h100, and --sequence, such as 4096");
  }
  if (flags.ranks && flags.cluster) {
    return wrong("both --ranks and --cluster were given, wanted one of them");
  }
  if (!flags.ranks && !flags.cluster) {
    return wrong("no ranks were given, wanted --ranks N or --cluster CLUSTER.json");
  }
  if (flags.memory && flags.cluster) {
    return wrong("--memory goes with --ranks; the ranks of --cluster have memory_bytes each");
  }
  if (flags.slack && !flags.pack) return wrong("--slack goes with --pack");
  if (flags.pack && flags.recompute != "none") {
    return wrong("--recompute with --pack: wanted one of them");
  }
  return {};
}

Expected<void> check_number(std::string_view flag, const std::optional<std::int64_t>& value,
                            std::int64_t max) {
  if (!value || (*value >= 1 && *value <= max)) return {};
  return make_error(ErrorCode::kBadInput, "{} is {}, wanted a whole number from 1 to {}", flag,
                    *value, max);
}

Expected<void> check_numbers(const PlanFlags& flags) {
  constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;
  DYNMO_TRY(check_number("--sequence", flags.sequence, kMaxTokens));
  DYNMO_TRY(check_number("--micro-batch-size", flags.micro_batch_size, kMaxTokens));
  DYNMO_TRY(check_number("--head-slices", flags.head_slices, kMaxTokens));
  DYNMO_TRY(check_number("--ranks", flags.ranks, kMaxRanks));
  DYNMO_TRY(check_number("--micro-batches", flags.micro_batches, 1 << 16));
  DYNMO_TRY(check_number("--evaluations", flags.evaluations, std::int64_t{1} << 40));
  if (flags.head_room && !(*flags.head_room >= 0 && *flags.head_room < 1)) {
    return make_error(ErrorCode::kBadInput,
                      "--head-room is {}, wanted a share of the memory from 0 to less than 1, such "
                      "as 0.1",
                      *flags.head_room);
  }
  if (flags.slack && !(*flags.slack >= 0 && std::isfinite(*flags.slack))) {
    return make_error(ErrorCode::kBadInput,
                      "--slack is {}, wanted 0 or more, such as 0.05 for 5 % more time a step",
                      *flags.slack);
  }
  return {};
}

// The question after files were read and flags were parsed.
struct Question {
  cost::ModelCost model;
  cost::Cluster cluster;  // memory without the head-room
  double head_room = 0;   // share of every rank's memory that stays free
  std::string links;      // where those of the cluster come from; empty: from the user
  std::string costs;      // where the layers' come from; empty: a profile
  double tokens = 0;      // of a micro-batch; 0: not known
  int micro_batches = 1;
  plan::Balancer balancer = plan::Balancer::kOptimal;
  std::optional<schedule::ScheduleKind> schedule;
  plan::Recompute recompute = plan::Recompute::kNone;
  std::optional<plan::Plan> from;
};

// The model's costs, and what they rest on.
Expected<void> read_model(const PlanFlags& flags, Question& question) {
  if (flags.profile) {
    DYNMO_ASSIGN(question.model, cost::read_profile(*flags.profile));
    return {};
  }
  DYNMO_ASSIGN(const cost::Device device, cost::find_device(*flags.device));
  DYNMO_ASSIGN(cost::TransformerShape shape, cost::read_config(*flags.model, *flags.sequence,
                                                               flags.micro_batch_size.value_or(1)));
  shape.head_slices = flags.head_slices.value_or(1);
  DYNMO_ASSIGN(cost::ModelCost kernels, cost::transformer_costs(shape, device));
  question.model = cost::at_utilization(std::move(kernels), device);
  question.tokens = static_cast<double>(shape.tokens());
  question.costs = fmt::format(
      "by formulas, not measured: {} at {:.3g} of the speed of its kernels "
      "(docs/costs.md)",
      device.name, device.utilization);
  return {};
}

// Libraries, buffers and fragmentation have to fit, too, and formulas and presets leave them out. A
// memory that the user names is taken by its word.
constexpr double kDeviceHeadRoom = 0.1;

// Reads the memory of each of --ranks: as given, else the device's, else unlimited.
Expected<Bytes> read_memory(const PlanFlags& flags) {
  if (flags.memory) {
    const auto memory = parse_bytes(*flags.memory);
    if (memory && *memory > Bytes{0}) return *memory;
    return memory ? make_error(ErrorCode::kBadInput,
                               "--memory is {}, wanted more than 0, such as 80GiB", *flags.memory)
                  : make_error(ErrorCode::kBadInput, "--memory: {}", memory.error().message);
  }
  if (!flags.model) return cost::kUnlimitedMemory;
  DYNMO_ASSIGN(const cost::Device device, cost::find_device(*flags.device));
  return device.memory;
}

// An order of the plan's own may be one that no step survives: its grid shows where it stops.
Expected<void> check_order(const plan::Plan& from, const Question& question,
                           const std::string& path) {
  if (from.order.empty()) return {};
  const auto actions =
      plan::schedule_of(from, question.micro_batches, question.model.frozen_layers());
  if (!actions) return {};  // for another number of micro-batches
  const schedule::Schedule lowered = schedule::lower(*actions);
  const auto fault = schedule::find_fault(lowered);
  if (!fault) return {};
  print_error_text(schedule::explain(lowered) + "\n");
  return make_error(ErrorCode::kBadInput, "{}: /order cannot run: {}", path, fault->message);
}

// The ranks, their memory and their links: the user's, or equal ranks with the links that a device
// has inside a node.
Expected<void> read_cluster(const PlanFlags& flags, Question& question) {
  if (flags.cluster) {
    DYNMO_ASSIGN(question.cluster, cost::read_cluster(*flags.cluster));
  } else {
    DYNMO_ASSIGN(const Bytes memory, read_memory(flags));
    question.cluster = cost::equal_ranks(static_cast<int>(*flags.ranks), memory);
  }
  const bool device_memory = flags.model && !flags.memory && !flags.cluster;
  question.head_room = flags.head_room.value_or(device_memory ? kDeviceHeadRoom : 0);
  question.cluster = cost::with_head_room(std::move(question.cluster), question.head_room);
  if (!flags.model || flags.cluster) return {};
  DYNMO_ASSIGN(const cost::Device device, cost::find_device(*flags.device));
  question.cluster.inside_node = question.cluster.between_nodes = device.inside_node;
  question.links = fmt::format("those of {} inside a node", device.name);
  return {};
}

// The plan in force, on as many ranks as are offered.
Expected<plan::Plan> read_from(const std::string& path, const Question& question) {
  DYNMO_ASSIGN(plan::Plan from, plan::read_plan(path));
  if (from.layers() != question.model.size()) {
    return make_error(ErrorCode::kBadInput,
                      "{}: the plan has {} layers, the model {}: wanted a plan for this model",
                      path, from.layers(), question.model.size());
  }
  for (const plan::PlanStage& stage : from.stages) {
    if (stage.rank.value < question.cluster.size()) continue;
    return make_error(ErrorCode::kBadInput,
                      "{}: the plan uses rank {}, but {} ranks are offered: offer at least as many "
                      "(--pack leaves ranks idle)",
                      path, stage.rank, question.cluster.size());
  }
  from.ranks = question.cluster.size();
  if (!from.order.empty()) from.order.resize(static_cast<std::size_t>(from.ranks));
  DYNMO_TRY(check_order(from, question, path));
  return from;
}

Expected<Question> read_question(const PlanFlags& flags) {
  Question question;
  DYNMO_ASSIGN(question.balancer, plan::parse_balancer(flags.balancer));
  if (flags.schedule != "auto") {
    DYNMO_ASSIGN(question.schedule, schedule::parse_schedule_kind(flags.schedule));
  }
  const auto recompute = plan::parse_recompute(flags.recompute);
  if (!recompute) {
    return make_error(ErrorCode::kBadInput, "--recompute: {}", recompute.error().message);
  }
  question.recompute = *recompute;
  question.micro_batches = static_cast<int>(flags.micro_batches);
  DYNMO_TRY(read_model(flags, question));
  DYNMO_TRY(read_cluster(flags, question));
  if (flags.from) {
    DYNMO_ASSIGN(question.from, read_from(*flags.from, question));
  }
  return question;
}

Expected<plan::RecomputeProposal> propose(const Question& question, const PlanFlags& flags) {
  const plan::BalanceProblem problem{
      .model = question.model,
      .cluster = question.cluster,
      .micro_batches = question.micro_batches,
      .schedule = question.schedule.value_or(schedule::ScheduleKind::k1F1B),
      .current = question.from ? &*question.from : nullptr};
  plan::ProposeOptions options;
  options.schedules =
      question.schedule ? plan::ScheduleChoice::kAsGiven : plan::ScheduleChoice::kBest;
  options.rank_order = plan::RankOrder::kPermuteEqual;
  if (flags.evaluations) options.evaluations = *flags.evaluations;
  StatusLine line;
  if (question.balancer == plan::Balancer::kSearch) line.show("searching for a plan ...");
  if (!flags.pack) return plan::propose(question.balancer, problem, options, question.recompute);
  const plan::PackOptions packing{.slack = flags.slack.value_or(0), .propose = options};
  DYNMO_ASSIGN(plan::Packing packed, plan::pack(question.balancer, problem, packing));
  return plan::RecomputeProposal{.proposal = std::move(packed.proposal), .layers = {}};
}

std::string made_by(const plan::Proposal& proposal, const PlanFlags& flags) {
  std::string text = proposal.winner;
  if (text.find(flags.balancer) == std::string::npos) text = flags.balancer + ": " + text;
  if (proposal.candidates > 1) text += fmt::format(", best of {} plans", proposal.candidates);
  if (proposal.rounds > 0) {
    text += fmt::format(" after {} rounds (bound {:.0f})", proposal.rounds, proposal.rounds_bound);
  }
  return text;
}

// Lists the plans to compare with: the plan in force, and an even cut under 1F1B where there is
// one.
std::vector<observe::Compared> comparisons(const Question& question) {
  std::vector<observe::Compared> compared;
  const auto add = [&](std::string name, const plan::Plan& plan) {
    auto evaluation =
        plan::evaluate(plan, question.model, question.cluster, question.micro_batches);
    if (!evaluation) return;  // more ranks than layers, an order for other micro-batches
    const bool fits = plan::fits_memory(evaluation->result, question.cluster);
    compared.push_back({std::move(name), std::move(*evaluation), fits});
  };
  if (question.from) add("plan in force", *question.from);
  const auto even =
      plan::balance(plan::Balancer::kUniform, {.model = question.model,
                                               .cluster = question.cluster,
                                               .micro_batches = question.micro_batches});
  if (even) add("uniform 1f1b", plan::make_plan(*even, schedule::ScheduleKind::k1F1B));
  return compared;
}

Expected<void> write_trace(const std::string& path, const plan::Evaluation& evaluation) {
  const std::vector<observe::TraceProcess> processes = {
      {.name = "planned",
       .steps = {
           {.timeline = evaluation.result.timeline, .duration = evaluation.result.step_time}}}};
  return write_file_durably(path, observe::trace_json(processes));
}

Expected<void> write_schedule(const std::string& path, const plan::Plan& plan,
                              const Question& question, int frozen_layers) {
  DYNMO_ASSIGN(const schedule::Schedule actions,
               plan::schedule_of(plan, question.micro_batches, frozen_layers));
  return write_file_durably(path, schedule::write_csv(actions));
}

// Nothing that is read or written is overwritten by something else.
Expected<void> check_outputs(const PlanFlags& flags) {
  std::vector<std::pair<std::string_view, std::string>> used;
  for (const auto& [name, path] :
       {std::pair<std::string_view, const std::optional<std::string>&>{"PROFILE", flags.profile},
        {"--model", flags.model},
        {"--cluster", flags.cluster},
        {"--out", flags.out},
        {"--trace", flags.trace},
        {"--schedule-csv", flags.schedule_csv}}) {
    if (!path) continue;
    for (const auto& [other, taken] : used) {
      if (!is_same_file(taken, *path)) continue;
      return make_error(ErrorCode::kBadInput, "{} and {} are both '{}': name another file", other,
                        name, *path);
    }
    used.emplace_back(name, *path);
  }
  return {};
}

Expected<int> run_plan(const PlanFlags& flags) {
  DYNMO_TRY(check_sources(flags));
  DYNMO_TRY(check_numbers(flags));
  DYNMO_TRY(check_outputs(flags));
  DYNMO_ASSIGN(const Question question, read_question(flags));
  auto answer = propose(question, flags);
  if (!answer && question.head_room > 0 && answer.error().code == ErrorCode::kInfeasible) {
    return make_error(ErrorCode::kInfeasible, "{} ({:.3g} % of the memory stay free: --head-room)",
                      answer.error().message, 100 * question.head_room);
  }
  DYNMO_ASSIGN(const plan::RecomputeProposal proposed, std::move(answer));
  const plan::Proposal& found = proposed.proposal;
  const cost::ModelCost costs = plan::recomputed(question.model, proposed.layers);
  DYNMO_ASSIGN(
      const plan::Evaluation evaluation,
      plan::evaluate_recomputed(found.plan, question.model, question.cluster,
                                question.micro_batches, proposed.layers, {.timeline = true}));
  plan::Migration migration;
  if (question.from) migration = plan::difference(*question.from, found.plan, question.model);
  Json json = plan::plan_json(found.plan, evaluation, costs, flags.balancer, migration);
  if (question.recompute != plan::Recompute::kNone) {
    Json& layers = json["recomputed_layers"] = Json::array();
    for (const LayerId id : proposed.layers) layers.push_back(id.value);
  }
  if (!question.costs.empty()) {
    json["costs"] = question.costs;
    json["tokens_per_s"] = question.tokens * question.micro_batches / evaluation.step_time_s;
  }
  if (flags.out) DYNMO_TRY(write_file_durably(*flags.out, json.dump(1) + "\n"));
  if (flags.trace) DYNMO_TRY(write_trace(*flags.trace, evaluation));
  if (flags.schedule_csv) {
    DYNMO_TRY(write_schedule(*flags.schedule_csv, found.plan, question, costs.frozen_layers()));
  }
  if (flags.json) {
    fmt::print("{}\n", json.dump(1));
    return 0;
  }
  observe::PlanReport report{.model = costs,
                             .cluster = question.cluster,
                             .micro_batches = question.micro_batches,
                             .plan = found.plan,
                             .evaluation = evaluation,
                             .made_by = made_by(found, flags),
                             .compared = comparisons(question),
                             .migration = {},
                             .recomputed = proposed.layers,
                             .head_room = question.head_room,
                             .links = question.links,
                             .costs = question.costs,
                             .tokens = question.tokens};
  if (question.from) report.migration = std::move(migration);
  fmt::print("{}", observe::plan_report(
                       report, {.width = terminal_width(), .ascii = !terminal_has_utf8()}));
  return 0;
}

// With --json an error goes to standard output too, for the program that reads there.
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
  command.add_option("--device", flags.device, "What --model runs on: h200, h100, a100, cpu");
  command.add_option("--sequence", flags.sequence, "Tokens of a sequence, with --model");
  command.add_option("--micro-batch-size", flags.micro_batch_size,
                     "Sequences of a micro-batch, with --model; default 1");
  command.add_option("--head-slices", flags.head_slices,
                     "Layers that the head is cut into, with --model; default 1");
  command.add_option("--ranks", flags.ranks,
                     "Equal ranks; with --model the device's links inside a node, else no latency "
                     "and unlimited bandwidth");
  command.add_option("--memory", flags.memory,
                     "Memory of each of --ranks, such as 80GiB; default unlimited, with --model "
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

void add_plan_options(CLI::App& command, PlanFlags& flags) {
  command.add_option("--micro-batches", flags.micro_batches, "Micro-batches of a step")
      ->capture_default_str();
  command
      .add_option("--balancer", flags.balancer,
                  fmt::format("{}", fmt::join(balancer_names(), ", ")))
      ->capture_default_str();
  command
      .add_option("--schedule", flags.schedule,
                  fmt::format("{}, or auto for the best", fmt::join(schedule_names(), ", ")))
      ->capture_default_str();
  command
      .add_option(
          "--recompute", flags.recompute,
          "Layers that run forward again instead of keeping activations: none, whole (all), "
          "or auto: as few as the memory asks for")
      ->capture_default_str();
  command.add_option("--from", flags.from, "The plan in force: what moves, and what it gains")
      ->option_text("PLAN.json");
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
      ->add_option("--schedule-csv", flags->schedule_csv,
                   "Write the actions of every rank for PyTorch's pipelining, as its "
                   "\"compute_only\" CSV")
      ->option_text("SCHEDULE.csv");
  command->add_flag("--json", flags->json, "Print the plan as JSON and nothing else");
  run_when_parsed(command, chosen, flags, run_plan_command);
}

}  // namespace dynmo::app
