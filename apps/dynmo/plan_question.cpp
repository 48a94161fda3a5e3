// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/plan_question.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "apps/dynmo/command.h"
#include "apps/dynmo/terminal.h"
#include "dynmo/config/config.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/device.h"
#include "dynmo/cost/files.h"
#include "dynmo/cost/hugging_face.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/data/dataset.h"
#include "dynmo/plan/place.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/lowering.h"

namespace dynmo::app {
namespace {

constexpr std::int64_t kMaxRanks = 1 << 16;

Error wrong(std::string message) { return Error{ErrorCode::kBadInput, std::move(message)}; }

// Checks flags that exclude or need one another.
Expected<void> check_sources(const PlanFlags& flags) {
  const int models = (flags.profile ? 1 : 0) + (flags.model ? 1 : 0) + (flags.config ? 1 : 0);
  if (models > 1) {
    return wrong("PROFILE.json, --model and --config exclude one another, wanted one of them");
  }
  if (models == 0) {
    return wrong(
        "no model was given, wanted PROFILE.json, --model CONFIG.json or --config RUN.toml");
  }
  if (flags.profile &&
      (flags.device || flags.sequence || flags.micro_batch_size || flags.head_slices)) {
    return wrong(
        "--device, --sequence, --micro-batch-size and --head-slices go with --model, not with a "
        "profile");
  }
  if (!flags.model && (flags.tensor_parallel || flags.optimizer_shards)) {
    return wrong("--tensor-parallel and --optimizer-shards go with --model");
  }
  if (flags.model && (!flags.device || !flags.sequence)) {
    return wrong("--model wants --device, such as h100, and --sequence, such as 4096");
  }
  if (flags.config && !flags.device) return wrong("--config wants --device, such as h100");
  if (flags.config && (flags.sequence || flags.micro_batch_size)) {
    return wrong(
        "--sequence and --micro-batch-size go with --model; --config has model.sequence and "
        "batch.micro_batch_size");
  }
  if (flags.ranks && flags.cluster) {
    return wrong("both --ranks and --cluster were given, wanted one of them");
  }
  if (!flags.ranks && !flags.cluster && !flags.config) {
    return wrong("no ranks were given, wanted --ranks N or --cluster CLUSTER.json");
  }
  if (flags.memory && flags.cluster) {
    return wrong("--memory goes with --ranks; the ranks of --cluster have memory_bytes each");
  }
  if (flags.slack && !flags.pack) return wrong("--slack goes with --pack");
  if (flags.emit_to && !flags.emit) return wrong("--emit-to goes with --emit");
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
  DYNMO_TRY(check_number("--tensor-parallel", flags.tensor_parallel, kMaxRanks));
  DYNMO_TRY(check_number("--optimizer-shards", flags.optimizer_shards, kMaxRanks));
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

// Reads the config of a training, and sets flags that are not given from it.
Expected<config::Config> take_config(PlanFlags& flags) {
  config::Config config;
  if (!flags.config) return config;
  DYNMO_TRY(config::apply_file(config, *flags.config));
  const auto valid = config::validate(config);
  if (!valid) {
    return make_error(ErrorCode::kBadInput, "{}: {}", *flags.config, valid.error().message);
  }
  if (!flags.cluster && !flags.ranks) {
    if (config.pipeline.ranks == 0) {
      return make_error(ErrorCode::kBadInput,
                        "{}: pipeline.ranks is 0, the usable cores of a host: wanted --ranks N or "
                        "--cluster CLUSTER.json",
                        *flags.config);
    }
    flags.ranks = config.pipeline.ranks;
  }
  if (!flags.memory && !flags.cluster && config.pipeline.memory > Bytes{0}) {
    flags.memory = fmt::format("{}", config.pipeline.memory.value);
  }
  const auto take = [](auto& flag, const auto& value) {
    if (!flag) flag = value;
  };
  take(flags.micro_batches, config.batch.micro_batches);
  take(flags.balancer, config.pipeline.balancer);
  take(flags.schedule, config.pipeline.schedule);
  take(flags.recompute, config.pipeline.recompute);
  return config;
}

// Returns the vocabulary of the config's decoder, found as a training does.
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

// Reads the model's costs, and their origin.
Expected<void> read_model(const PlanFlags& flags, const config::Config& config,
                          plan::Question& question) {
  if (flags.profile) {
    DYNMO_ASSIGN(question.model, cost::read_profile(*flags.profile));
    return {};
  }
  DYNMO_ASSIGN(cost::Device device, cost::find_device(*flags.device));
  cost::TransformerShape shape;
  if (flags.model) {
    DYNMO_ASSIGN(shape, cost::read_config(*flags.model, *flags.sequence,
                                          flags.micro_batch_size.value_or(1)));
  } else {
    DYNMO_ASSIGN(const std::int64_t vocabulary, vocabulary_of(config, *flags.config));
    shape = config::transformer_shape(config, vocabulary);
    device.bytes_per_element = config.model.precision == "bf16" ? 2 : 4;
    question.size_key = "batch.micro_batch_size =";
  }
  if (flags.head_slices) shape.head_slices = *flags.head_slices;
  DYNMO_TRY(plan::set_shape(question, shape, device,
                            {.tensor = flags.tensor_parallel.value_or(1),
                             .optimizer_shards = flags.optimizer_shards.value_or(1)}));
  if (flags.config) question.room_keys.clear();  // a training has no such keys
  return {};
}

// Returns the memory of each of --ranks, if given.
Expected<std::optional<Bytes>> read_memory(const PlanFlags& flags) {
  if (!flags.memory) return std::optional<Bytes>();
  const auto memory = parse_bytes(*flags.memory);
  if (memory && *memory > Bytes{0}) return std::optional<Bytes>(*memory);
  return memory ? make_error(ErrorCode::kBadInput,
                             "--memory is {}, wanted more than 0, such as 80GiB", *flags.memory)
                : make_error(ErrorCode::kBadInput, "--memory: {}", memory.error().message);
}

// Reads the cluster that the user gives. Without one it makes equal ranks with the links of the
// device inside a node.
Expected<void> read_cluster(const PlanFlags& flags, plan::Question& question) {
  if (flags.cluster) {
    DYNMO_ASSIGN(cost::Cluster cluster, cost::read_cluster(*flags.cluster));
    plan::set_cluster(question, std::move(cluster), flags.head_room);
    return {};
  }
  DYNMO_ASSIGN(const std::optional<Bytes> memory, read_memory(flags));
  std::optional<cost::Device> device;
  if (!flags.profile) {
    DYNMO_ASSIGN(device, cost::find_device(*flags.device));
  }
  plan::set_ranks(question, static_cast<int>(*flags.ranks), memory, device, flags.head_room);
  return {};
}

// Refuses the flags that cannot change the answer to this question.
Expected<void> check_effects(const PlanFlags& given, const plan::Question& question) {
  const cost::Cluster& cluster = question.cluster;
  const bool searches = question.balancer == plan::Balancer::kSearch;
  const bool bounded = std::ranges::any_of(cluster.ranks, [](const cost::ClusterRank& rank) {
    return rank.memory < cost::kUnlimitedMemory;
  });
  constexpr std::string_view kBounded =
      "--memory, --device or a --cluster whose ranks have memory_bytes";
  return check_flags({
      {"--evaluations", given.evaluations.has_value(), searches, "--balancer search"},
      {"--place", given.place, plan::place_matters(cluster),
       "a --cluster of unlike ranks or links"},
      {"--pack", given.pack, cluster.size() > 1, "more than one of --ranks"},
      {"--head-room", given.head_room.value_or(0) > 0, bounded, kBounded},
      {"--recompute auto", given.recompute == "auto", bounded, kBounded},
  });
}

// Reads the plan in force. The error for an order that cannot run shows where it stops.
Expected<void> read_from(const std::string& path, plan::Question& question) {
  DYNMO_ASSIGN(const plan::Plan from, plan::read_plan(path));
  auto set = plan::set_from(question, from, path);
  if (!set) {
    const auto broken = plan::broken_order(from, question);
    if (broken) print_error_text(schedule::explain(*broken) + "\n");
  }
  return set;
}

}  // namespace

Expected<plan::Question> read_question(const PlanFlags& given) {
  PlanFlags flags = given;
  DYNMO_TRY(check_sources(flags));
  DYNMO_TRY(check_numbers(flags));
  DYNMO_ASSIGN(const config::Config config, take_config(flags));
  plan::Question question;
  DYNMO_ASSIGN(question.balancer, plan::parse_balancer(flags.balancer.value_or(kBalancer)));
  if (const std::string schedule = flags.schedule.value_or(kSchedule); schedule != "auto") {
    DYNMO_ASSIGN(question.schedule, schedule::parse_schedule_kind(schedule));
  }
  question.micro_batches = static_cast<int>(flags.micro_batches.value_or(kMicroBatches));
  question.place = flags.place;
  question.pack = flags.pack;
  question.slack = flags.slack.value_or(0);
  if (flags.evaluations) question.evaluations = *flags.evaluations;
  DYNMO_TRY(read_model(flags, config, question));
  if (flags.emit) {
    DYNMO_ASSIGN(question.form, plan::parse_emit_form(*flags.emit));
  }
  DYNMO_TRY(plan::set_granularity(question, flags.granularity));
  if (flags.recompute) {
    const auto recompute = plan::parse_recompute(*flags.recompute);
    if (!recompute) {
      return make_error(ErrorCode::kBadInput, "--recompute: {}", recompute.error().message);
    }
    question.recompute = *recompute;
  }
  DYNMO_TRY(read_cluster(flags, question));
  DYNMO_TRY(check_effects(given, question));
  if (flags.from) DYNMO_TRY(read_from(*flags.from, question));
  return question;
}

}  // namespace dynmo::app
