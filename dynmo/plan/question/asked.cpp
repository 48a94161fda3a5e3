// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/question/asked.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "dynmo/core/effects.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/device.h"
#include "dynmo/cost/files.h"
#include "dynmo/cost/hugging_face.h"
#include "dynmo/plan/place.h"

namespace dynmo::plan {
namespace {

using With = Option::With;

// Texts of errors that differ from the argument of a flag.
constexpr std::array<std::pair<std::string_view, std::string_view>, 10> kOfArguments = {
    {{"a profile", "measured costs"},
     {"--model or --config", "a Hugging Face config"},
     {"--model", "a Hugging Face config"},
     {"--ranks N or --cluster CLUSTER.json", "ranks=N or cluster="},
     {"of --cluster", "of a cluster"},
     {"a --cluster", "a cluster"},
     {"--recompute auto", "recompute='auto'"},
     {"with --pack", "with pack=True"},
     {"--balancer search", "balancer='search'"},
     {"no ranks were given, wanted", "wanted"}}};

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

// An error whose text names flags.
Error refusal(std::string text, Spelling spelling) {
  if (spelling == Spelling::kArgument) {
    for (const auto& [from, to] : kOfArguments) replace_all(text, from, to);
    Asked none;
    for (const Option& option : options_of(none)) {
      if (!option.argument.empty()) replace_all(text, option.flag, option.argument);
    }
  }
  return Error{ErrorCode::kBadInput, std::move(text)};
}

enum class Part { kCosts, kAll };

// Options that exclude or want one another, and numbers out of range.
Expected<void> check(Asked asked, Part part, Spelling spelling) {
  const int costs = (asked.profile ? 1 : 0) + (asked.model ? 1 : 0) + (asked.config ? 1 : 0);
  const double room = asked.head_room.value_or(0);
  const double slack = asked.slack.value_or(0);
  for (const auto& [broken, text] : std::initializer_list<std::pair<bool, std::string>>{
           {costs > 1,
            "PROFILE.json, --model and --config exclude one another, wanted one of them"},
           {costs == 0,
            "no model was given, wanted PROFILE.json, --model CONFIG.json or --config RUN.toml"},
           {asked.model && (!asked.device || !asked.sequence),
            "--model wants --device, such as h100, and --sequence, such as 4096"},
           {asked.config && !asked.device, "--config wants --device, such as h100"},
           {asked.ranks && asked.cluster,
            "both --ranks and --cluster were given, wanted one of them"},
           {part == Part::kAll && !asked.ranks && !asked.cluster,
            "no ranks were given, wanted --ranks N or --cluster CLUSTER.json"},
           {asked.memory && asked.cluster,
            "--memory goes with --ranks; the ranks of --cluster have memory_bytes each"},
           {asked.slack && !asked.pack, "--slack goes with --pack"},
           {!(room >= 0 && room < 1), fmt::format("--head-room is {}, wanted a share of the memory "
                                                  "from 0 to less than 1, such as 0.1",
                                                  room)},
           {!(slack >= 0 && std::isfinite(slack)),
            fmt::format("--slack is {}, wanted 0 or more, such as 0.05 for 5 % more time a step",
                        slack)},
       }) {
    if (broken) return refusal(text, spelling);
  }
  for (const Option& option : options_of(asked)) {
    if (!is_given(option)) continue;
    const bool shape = option.with == With::kShape;
    if (option.with != With::kAny && !asked.model && !(shape && asked.config)) {
      return refusal(
          fmt::format("{} goes with --model{}{}", option.flag, shape ? " or --config" : "",
                      asked.profile ? ", not with a profile"
                      : asked.sequence || asked.micro_batch_size
                          ? "; --config has model.sequence and batch.micro_batch_size"
                          : ""),
          spelling);
    }
    if (option.max == 0) continue;
    const std::int64_t value = **std::get<std::optional<std::int64_t>*>(option.value);
    if (value >= 1 && value <= option.max) continue;
    return refusal(
        fmt::format("{} is {}, wanted a whole number from 1 to {}", option.flag, value, option.max),
        spelling);
  }
  return {};
}

// Reads a file, or takes what the caller has read.
template <typename Read, typename Parse>
auto load(const Asked& asked, const std::string& name, Read read, Parse parse) {
  const auto found = asked.documents.find(name);
  return found == asked.documents.end() ? read(name) : parse(*found, name);
}

Expected<cost::TransformerShape> shape_of(const Asked& asked) {
  if (asked.shape) return *asked.shape;
  const std::int64_t size = asked.micro_batch_size.value_or(1);
  return load(
      asked, *asked.model,
      [&](const std::string& path) { return cost::read_config(path, *asked.sequence, size); },
      [&](const Json& json, const std::string& name) {
        return cost::parse_config(json, name, *asked.sequence, size);
      });
}

Expected<void> set_costs(Question& question, const Asked& asked) {
  if (asked.profile) {
    DYNMO_ASSIGN(question.model,
                 load(asked, *asked.profile, cost::read_profile, cost::parse_profile));
    return {};
  }
  DYNMO_ASSIGN(cost::Device device, cost::find_device(*asked.device));
  const cost::Parallelism parallelism{.tensor = asked.tensor_parallel.value_or(1),
                                      .optimizer_shards = asked.optimizer_shards.value_or(1)};
  if (asked.work) {
    if (asked.head_slices.value_or(1) != 1) {
      return make_error(ErrorCode::kBadInput, "head_slices goes with a model that has formulas");
    }
    const auto tokens = static_cast<double>(*asked.sequence * asked.micro_batch_size.value_or(1));
    DYNMO_TRY(set_work(question, *asked.work, tokens, device, parallelism));
    question.costs += "; layers as transformers builds them";
    return {};
  }
  DYNMO_ASSIGN(cost::TransformerShape shape, shape_of(asked));
  if (asked.config) {
    device.bytes_per_element = asked.bytes_per_element;
    question.size_key = "batch.micro_batch_size =";
  }
  if (asked.head_slices) shape.head_slices = *asked.head_slices;
  DYNMO_TRY(set_shape(question, shape, device, parallelism));
  if (asked.config) question.room_keys.clear();  // a training has neither
  return {};
}

Expected<void> set_ranks(Question& question, const Asked& asked, Spelling spelling) {
  if (asked.cluster) {
    DYNMO_ASSIGN(cost::Cluster cluster,
                 load(asked, *asked.cluster, cost::read_cluster, cost::parse_cluster));
    set_cluster(question, std::move(cluster), asked.head_room);
    return {};
  }
  std::optional<Bytes> memory;
  if (asked.memory) {
    const auto given = parse_bytes(*asked.memory);
    if (!given) return refusal("--memory: " + given.error().message, spelling);
    if (*given <= Bytes{0}) {
      return refusal(
          fmt::format("--memory is {}, wanted more than 0, such as 80GiB", *asked.memory),
          spelling);
    }
    memory = *given;
  }
  std::optional<cost::Device> device;
  if (asked.device) {
    DYNMO_ASSIGN(device, cost::find_device(*asked.device));
  }
  set_ranks(question, static_cast<int>(*asked.ranks), memory, device, asked.head_room);
  return {};
}

template <typename Values>
std::string names_of(const Values& values) {
  std::vector<std::string_view> names;
  for (const auto& value : values) {
    if constexpr (requires { value.name; }) {
      names.push_back(value.name);
    } else {
      names.push_back(name(value));
    }
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

std::vector<Option> options_of(Asked& asked) {
  constexpr std::int64_t kMaxTokens = cost::DecoderLimits{}.tokens;
  return {
      {"profile", "costs", &asked.profile, "Costs of every layer, as `dynmo train` writes them",
       "PROFILE.json"},
      {"--model", "config", &asked.model, "Instead: a Hugging Face config.json or its folder",
       "CONFIG.json"},
      {"--config", "", &asked.config,
       "Instead: the config of a training; its ranks, schedule, balancer, memory and micro-batches "
       "hold where no flag says otherwise",
       "RUN.toml"},
      {"--device", "device", &asked.device,
       "What --model or --config runs on: h200, h100, a100, cpu", "", 0, With::kShape},
      {"--sequence", "sequence", &asked.sequence, "Tokens of a sequence, with --model", "",
       kMaxTokens, With::kModel},
      {"--micro-batch-size", "micro_batch_size", &asked.micro_batch_size,
       "Sequences of a micro-batch, with --model; default 1", "", kMaxTokens, With::kModel},
      {"--head-slices", "head_slices", &asked.head_slices,
       "Layers that the head is cut into, with --model or --config; default 1", "", kMaxTokens,
       With::kShape},
      {"--tensor-parallel", "tensor_parallel", &asked.tensor_parallel,
       "Devices of a rank, with --model; default 1. Each has a part of every matrix, and ranks are "
       "in nodes of the device",
       "", 0, With::kModel},
      {"--optimizer-shards", "optimizer_shards", &asked.optimizer_shards,
       "Replicas that divide the optimizer's state, with --model; default 1", "",
       cost::kMaxOptimizerShards, With::kModel},
      {"--ranks", "ranks", &asked.ranks,
       "Equal ranks; with --device its links inside a node, else no latency and unlimited "
       "bandwidth",
       "", 1 << 16},
      {"--memory", "memory", &asked.memory,
       "Memory of each of --ranks, such as 80GiB; default unlimited, with --device the device's"},
      {"--head-room", "head_room", &asked.head_room,
       "Share of every rank's memory to leave free; default 0.1 of a device's, else 0"},
      {"--cluster", "cluster", &asked.cluster, "Instead of --ranks: ranks, nodes and links",
       "CLUSTER.json"},
      {"--granularity", "granularity", &asked.granularity,
       "What moves on its own: half (attention, MLP, slices of the head) or block; default block "
       "with --emit torchtitan or megatron, else half"},
      {"--micro-batches", "micro_batches", &asked.micro_batches, "Micro-batches of a step", "",
       1 << 16, With::kAny, "32"},
      {"--balancer", "balancer", &asked.balancer, names_of(balancers()), "", 0, With::kAny,
       "search"},
      {"--schedule", "schedule", &asked.schedule,
       names_of(schedule::schedule_kinds()) + ", or auto for the best", "", 0, With::kAny, "auto"},
      {"--recompute", "recompute", &asked.recompute,
       "Layers that run forward again instead of keeping activations: none, whole (all), or auto: "
       "as few as the memory asks for; default auto with --model, else none"},
      {"--from", "current", &asked.from, "The plan in force: what moves, and what it gains",
       "PLAN.json"},
      {"--place", "place", &asked.place,
       "Let ranks take any position, so that neighbours share nodes and the step is shortest; "
       "without it they keep the order of the cluster"},
      {"--pack", "pack", &asked.pack, "Use as few ranks as the step time allows"},
      {"--slack", "slack", &asked.slack,
       "With --pack: how much longer a step may take, 0.05 for 5 %; default 0"},
      {"--evaluations", "evaluations", &asked.evaluations,
       "Effort of the search; default about 1 s", "", kMaxEvaluations},
      {"--emit", "form", &asked.form,
       "Write the plan for others, and find one that they can say: " + names_of(emit_forms()),
       "FORM"},
  };
}

bool is_given(const Option& option) {
  return std::visit([](const auto* value) { return static_cast<bool>(*value); }, option.value);
}

Expected<Question> question_of(const Asked& asked, Spelling spelling) {
  DYNMO_TRY(check(asked, Part::kAll, spelling));
  Question question;
  DYNMO_ASSIGN(question.balancer, parse_balancer(asked.balancer.value_or("search")));
  if (const std::string kind = asked.schedule.value_or("auto"); kind != "auto") {
    DYNMO_ASSIGN(question.schedule, schedule::parse_schedule_kind(kind));
  }
  question.micro_batches = static_cast<int>(asked.micro_batches.value_or(question.micro_batches));
  question.evaluations = asked.evaluations.value_or(question.evaluations);
  question.stages_per_rank =
      static_cast<int>(asked.stages_per_rank.value_or(question.stages_per_rank));
  question.place = asked.place;
  question.pack = asked.pack;
  question.slack = asked.slack.value_or(0);
  DYNMO_TRY(set_costs(question, asked));
  if (asked.form) {
    DYNMO_ASSIGN(question.form, parse_emit_form(*asked.form));
    DYNMO_TRY(check_divided(*question.form, question.shape, question.parallelism));
  }
  DYNMO_TRY(set_granularity(question, asked.granularity));
  if (asked.recompute) {
    const auto recompute = parse_recompute(*asked.recompute);
    if (!recompute) return refusal("--recompute: " + recompute.error().message, spelling);
    question.recompute = *recompute;
  }
  DYNMO_TRY(set_ranks(question, asked, spelling));
  return question;
}

Expected<void> check_effects(const Asked& asked, const Question& question, Spelling spelling) {
  const cost::Cluster& cluster = question.cluster;
  const bool bounded = std::ranges::any_of(cluster.ranks, [](const cost::ClusterRank& rank) {
    return rank.memory < cost::kUnlimitedMemory;
  });
  constexpr std::string_view kBounded =
      "--memory, --device or a --cluster whose ranks have memory_bytes";
  const auto checked = check_flags({
      {"--evaluations", asked.evaluations.has_value(), question.balancer == Balancer::kSearch,
       "--balancer search"},
      {"--place", asked.place, place_matters(cluster), "a --cluster of unlike ranks or links"},
      {"--pack", asked.pack, cluster.size() > 1, "more than one rank"},
      {"--head-room", asked.head_room.value_or(0) > 0, bounded, kBounded},
      {"--recompute auto", asked.recompute == "auto", bounded, kBounded},
  });
  if (!checked) return refusal(checked.error().message, spelling);
  return {};
}

Expected<cost::ModelCost> costs_of(const Asked& asked, Spelling spelling) {
  DYNMO_TRY(check(asked, Part::kCosts, spelling));
  Question question;
  DYNMO_TRY(set_costs(question, asked));
  return std::move(question.model);
}

Expected<std::vector<cost::LayerWork>> work_of(const Asked& asked, Spelling spelling) {
  DYNMO_TRY(check(asked, Part::kCosts, spelling));
  DYNMO_ASSIGN(const cost::Device device, cost::find_device(*asked.device));
  DYNMO_ASSIGN(const cost::TransformerShape shape, shape_of(asked));
  DYNMO_TRY(cost::validate(shape));
  return cost::transformer_work(shape, device.bytes_per_element);
}

}  // namespace dynmo::plan
