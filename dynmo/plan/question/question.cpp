// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/question/question.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/cost/blocks.h"
#include "dynmo/plan/pack.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/lowering.h"

namespace dynmo::plan {
namespace {

Expected<Proposal> find_proposal(const Question& question, const cost::ModelCost& model) {
  BalanceProblem problem{{model, question.cluster, question.micro_batches}};
  if (question.schedule) problem.schedule = *question.schedule;
  if (question.from) problem.current = &*question.from;
  problem.stages_per_rank = question.stages_per_rank;
  problem.recompute = question.recompute;
  ProposeOptions options;
  options.schedules = question.schedule ? ScheduleChoice::kAsGiven : ScheduleChoice::kBest;
  options.rank_order = question.place ? RankOrder::kBest : RankOrder::kPermuteEqual;
  options.evaluations = question.evaluations;
  options.replays_cuts = question.whole_blocks;
  const PlanFilter sayable = [&](const Plan& plan) {
    return check_emit(*question.form, {.plan = plan, .model = model});
  };
  if (question.form) {
    options.accepts = &sayable;
    // The form places stages by the numbers of ranks.
    if (!question.place) options.rank_order = RankOrder::kKeep;
  }
  if (!question.pack) return propose(question.balancer, problem, options);
  DYNMO_ASSIGN(Packing packed,
               pack(question.balancer, problem, {.slack = question.slack, .propose = options}));
  return std::move(packed.proposal);
}

Json document_of(const Question& question, const Answer& answer) {
  Json json = plan_json(answer.proposal.plan, answer.evaluation, answer.costs,
                        name(question.balancer), answer.migration);
  if (question.recompute != Recompute::kNone) {
    Json& layers = json["recomputed_layers"] = Json::array();
    for (const LayerId id : answer.proposal.recomputed) layers.push_back(id.value);
  }
  json["traffic"] = traffic_json(answer.traffic);
  if (answer.advice) {
    json["advice"] = advice_json(*answer.advice, question.tokens * question.micro_batches);
  }
  if (answer.joined_head) {
    json["joined_head"] = {{"slices", answer.joined_head->slices},
                           {"sliced_step_time_s", answer.joined_head->sliced_step_time_s}};
  }
  if (!question.costs.empty()) {
    json["costs"] = question.costs;
    json["tokens_per_s"] = question.tokens * question.micro_batches / answer.evaluation.step_time_s;
  }
  return json;
}

// Costs with the head in `slices` and the answer's layers recomputed, but not the head.
Expected<ModelCosts> sliced_costs(const Question& question, const Answer& answer,
                                  std::int64_t slices) {
  DYNMO_ASSIGN(cost::ModelCost model, question.sliced ? question.sliced(slices)
                                                      : with_head_slices(question.model, slices));
  LayerSet layers = answer.proposal.recomputed;
  const auto blocks = question.model.size() - question.head_slices;
  std::erase_if(layers, [&](LayerId layer) { return layer.value >= blocks; });
  return ModelCosts{recomputed(std::move(model), layers)};
}

// Makes questions with a link or a speed changed, or with larger micro-batches for the same tokens.
class Changes {
 public:
  Changes(const Question& question, const Answer& answer) : question_(question), answer_(answer) {}

  [[nodiscard]] std::vector<AdviceChange> against(StepLimit limit) {
    if (limit == StepLimit::kSlowRank) {
      add_speed();
    } else if (limit == StepLimit::kMessages) {
      add_larger_micro_batches();
      add_times(0.5, AdviceKey::kInsideLatency, [](auto& c) { return &c.inside_node.latency_s; });
      add_times(0.5, AdviceKey::kBetweenLatency,
                [](auto& c) { return &c.between_nodes.latency_s; });
      add_times(2, AdviceKey::kInsideBandwidth,
                [](auto& c) { return &c.inside_node.bandwidth_bytes_per_s; });
      add_times(2, AdviceKey::kBetweenBandwidth,
                [](auto& c) { return &c.between_nodes.bandwidth_bytes_per_s; });
      add_times(2, AdviceKey::kNicBandwidth, [](auto& c) { return &c.nic_bandwidth_bytes_per_s; });
    }
    return std::move(found_);
  }

 private:
  void add(AdviceKey key, std::string value, cost::Cluster cluster) {
    found_.push_back({.set = {key, std::move(value)},
                      .models = {answer_.costs},
                      .cluster = std::move(cluster),
                      .micro_batches = question_.micro_batches});
  }
  void add_speed() {
    cost::Cluster other = question_.cluster;
    double fastest = 0;
    for (const cost::ClusterRank& rank : other.ranks) fastest = std::max(fastest, rank.speed);
    for (cost::ClusterRank& rank : other.ranks) rank.speed = fastest;
    add(AdviceKey::kSpeed, fmt::format("{}", fastest), std::move(other));
  }
  // Adds a change of a latency or bandwidth by a factor. The value is what its text of three digits
  // says.
  template <typename Field>
  void add_times(double times, AdviceKey key, Field field) {
    cost::Cluster other = question_.cluster;
    double& number = *field(other);
    if (!std::isfinite(number) || number <= 0) return;
    std::string value = fmt::format("{:.3g}", times * number);
    number = std::stod(value);
    add(key, std::move(value), std::move(other));
  }
  void add_larger_micro_batches() {
    if (!question_.sized || question_.micro_batches % 2 != 0) return;
    auto model = question_.sized(2);
    if (!model) return;
    const int half = question_.micro_batches / 2;
    AdviceChange& change = found_.emplace_back();
    change.set = {AdviceKey::kMicroBatchSize, std::to_string(2 * question_.micro_batch_size)};
    change.with = KeyValue{AdviceKey::kMicroBatches, std::to_string(half)};
    change.models = {recomputed(*std::move(model), answer_.proposal.recomputed)};
    change.cluster = question_.cluster;
    change.micro_batches = half;
  }

  const Question& question_;
  const Answer& answer_;
  std::vector<AdviceChange> found_ = {};
};

std::optional<Advice> advice_on(const Question& question, const Answer& answer) {
  const auto sliced = [&](std::int64_t slices) { return sliced_costs(question, answer, slices); };
  return advise(
      {.models = {answer.costs},
       .cluster = question.cluster,
       .micro_batches = question.micro_batches,
       .schedule = answer.proposal.plan.schedule,
       .schedules =
           question.schedule && !question.form ? ScheduleChoice::kAsGiven : ScheduleChoice::kBest,
       .stages_per_rank = question.stages_per_rank,
       .plans = question.pack ? std::vector<Evaluation>() : std::vector{answer.evaluation},
       .head_room = question.head_room,
       .head_slices = question.head_slices,
       .sliced = sliced,
       .changes = [&](StepLimit limit) { return Changes(question, answer).against(limit); }});
}

// Answers the same question with the slices of the head apart. The limits of an emit form do not
// count.
std::optional<JoinedHead> joined_head(const Question& question, const Answer& answer) {
  if (!question.with_slices) return std::nullopt;
  Question apart = question;
  apart.form.reset();
  apart.from.reset();
  JoinedHead joined{.slices = cost::head_slices(*question.with_slices),
                    .step_time_s = answer.evaluation.step_time_s};
  const auto sliced = find_proposal(apart, *question.with_slices);
  if (sliced) joined.sliced_step_time_s = sliced->evaluation.step_time_s;
  return joined;
}

// Returns what an error message of a question without a plan adds about memory.
std::string what_is_lacking(const Question& question) {
  std::string text;
  if (question.head_room > 0) {
    text =
        fmt::format(" ({:.3g} % of the memory stay free as head-room)", 100 * question.head_room);
  }
  if (question.device.empty()) return text;
  Bytes least = question.cluster.ranks.front().memory;
  for (const cost::ClusterRank& rank : question.cluster.ranks) least = std::min(least, rank.memory);
  Bytes states;
  for (const cost::LayerCost& layer : question.model.layers) states += cost::state_bytes(layer);
  const double ranks = std::ceil(static_cast<double>(states.value) /
                                 static_cast<double>(std::max<std::int64_t>(least.value, 1)));
  if (ranks <= question.cluster.size()) return text;
  text += fmt::format("; the layers' states alone take {}, the memory of {:.0f} such ranks",
                      format_bytes(states), ranks);
  if (!question.room_keys.empty()) text += "; " + question.room_keys;
  return text;
}

// Returns the messages of the first replica's ranks, because all replicas send alike.
TrafficRows traffic_of(const Question& question, const Answer& answer) {
  const Plan& plan = answer.proposal.plan;
  TrafficRows rows =
      traffic_of(plan, answer.costs, question.micro_batches, question.cluster.replicas);
  std::erase_if(rows, [&](const TrafficRow& row) { return row.from.value >= plan.ranks; });
  const TrafficRows moves = traffic_of(answer.migration, plan.ranks);
  rows.insert(rows.end(), moves.begin(), moves.end());
  return sums_of(std::move(rows));
}

// Returns the bytes of the values between two half blocks for one micro-batch.
double hidden_bytes(const cost::TransformerShape& shape, const cost::Device& device) {
  return static_cast<double>(shape.tokens()) * static_cast<double>(shape.hidden) *
         device.bytes_per_element;
}

Expected<void> check_heads(const cost::TransformerShape& shape,
                           const cost::Parallelism& parallelism) {
  if (shape.heads % parallelism.tensor == 0) return {};
  return make_error(ErrorCode::kBadInput,
                    "tensor_parallel is {}, wanted a divisor of the model's {} attention heads",
                    parallelism.tensor, shape.heads);
}

// Sets the fields that describe costs by formulas.
void set_origin(Question& question, double tokens, const cost::Device& device,
                const cost::Parallelism& parallelism) {
  question.parallelism = parallelism;
  question.device = device.name;
  question.tokens = tokens;
  question.recompute = Recompute::kAuto;
  question.costs = fmt::format(
      "by formulas, not measured: {} at {:.3g} of the speed of its kernels "
      "(docs/costs.md)",
      device.name, device.utilization);
  if (parallelism.tensor == 1 && parallelism.optimizer_shards == 1) {
    question.room_keys = fmt::format(
        "{}--optimizer-shards divides the optimizer's state among replicas",
        device.devices_per_node > 1 ? "--tensor-parallel makes a rank of several devices, and "
                                    : "");
  }
  if (parallelism.tensor > 1) {
    question.costs += fmt::format("; a rank is {} devices, bytes are of one", parallelism.tensor);
  }
  if (parallelism.optimizer_shards > 1) {
    question.costs +=
        fmt::format("; {} replicas share the optimizer's state", parallelism.optimizer_shards);
  }
}

// Returns ranks of `tensor` devices each. A node has the ranks that fit its devices.
cost::Cluster ranks_in_nodes(int ranks, std::int64_t tensor, Bytes memory,
                             const cost::Device& device) {
  cost::Cluster cluster = cost::equal_ranks(ranks, memory);
  const int in_a_node = device.devices_per_node / static_cast<int>(tensor);
  for (int i = 0; i < ranks; ++i) cluster.ranks[static_cast<std::size_t>(i)].node = i / in_a_node;
  return cluster;
}

}  // namespace

Expected<void> set_shape(Question& question, const cost::TransformerShape& shape,
                         const cost::Device& device, const cost::Parallelism& parallelism) {
  const auto costs_of =
      [device, parallelism](const cost::TransformerShape& other) -> Expected<cost::ModelCost> {
    DYNMO_TRY(cost::validate(other));
    return cost::parallel_costs(cost::transformer_work(other, device.bytes_per_element),
                                hidden_bytes(other, device), device, parallelism);
  };
  DYNMO_ASSIGN(question.model, costs_of(shape));
  DYNMO_TRY(check_heads(shape, parallelism));
  set_origin(question, static_cast<double>(shape.tokens()), device, parallelism);
  for (const std::string& note : shape.notes) question.costs += "; " + note;
  question.shape = static_cast<const cost::DecoderShape&>(shape);
  question.head_slices = shape.head_slices;
  question.micro_batch_size = shape.micro_batch_size;
  question.sliced = [shape, costs_of](std::int64_t slices) {
    cost::TransformerShape other = shape;
    other.head_slices = slices;
    return costs_of(other);
  };
  question.sized = [shape, costs_of](std::int64_t times) {
    cost::TransformerShape other = shape;
    other.micro_batch_size *= times;
    return costs_of(other);
  };
  return {};
}

Expected<void> set_work(Question& question, const std::vector<cost::LayerWork>& work, double tokens,
                        const cost::Device& device, const cost::Parallelism& parallelism) {
  const double hidden = work.empty() ? 0 : work.front().boundary_bytes;  // of the embedding
  DYNMO_ASSIGN(question.model, cost::parallel_costs(work, hidden, device, parallelism));
  set_origin(question, tokens, device, parallelism);
  question.sliced = [](std::int64_t) -> Expected<cost::ModelCost> {
    return make_error(ErrorCode::kBadInput, "counted layers have a whole head");
  };
  return {};
}

Expected<void> set_granularity(Question& question, const std::optional<std::string>& name) {
  const bool whole = question.form && takes_whole_blocks(*question.form);
  const std::string granularity = name.value_or(whole ? "block" : "half");
  if (granularity == "half") return {};
  if (granularity != "block") {
    return make_error(ErrorCode::kBadInput, "granularity is '{}', wanted half or block",
                      granularity);
  }
  if (cost::head_slices(question.model) > 1) {
    question.with_slices = cost::joined_blocks(question.model, cost::HeadSlices::kApart);
  }
  question.model = cost::joined_blocks(question.model);
  question.whole_blocks = true;
  question.head_slices = 1;
  question.sliced = [](std::int64_t) -> Expected<cost::ModelCost> {
    return make_error(ErrorCode::kBadInput, "a plan of whole blocks has a whole head");
  };
  return {};
}

void set_ranks(Question& question, int ranks, std::optional<Bytes> memory,
               const std::optional<cost::Device>& device, std::optional<double> head_room) {
  const bool device_memory = device && !memory;
  const Bytes offered = memory.value_or(device ? device->memory : cost::kUnlimitedMemory);
  const std::int64_t tensor = question.parallelism.tensor;
  const bool in_nodes = device && tensor > 1;
  set_cluster(question,
              in_nodes ? ranks_in_nodes(ranks, tensor, offered, *device)
                       : cost::equal_ranks(ranks, offered),
              head_room.value_or(device_memory ? kDeviceHeadRoom : 0));
  question.ranks_key = "--ranks";
  question.memory_key = "--memory";
  if (!device) return;
  question.cluster.inside_node = device->inside_node;
  question.cluster.between_nodes = in_nodes ? device->between_nodes : device->inside_node;
  question.links = in_nodes ? fmt::format("those of {} in nodes of {} devices", device->name,
                                          device->devices_per_node)
                            : fmt::format("those of {} inside a node", device->name);
}

void set_cluster(Question& question, cost::Cluster cluster, std::optional<double> head_room) {
  question.ranks_key = "--cluster with its first ranks only:";
  question.memory_key = "--cluster with memory_bytes of";
  question.head_room = head_room.value_or(0);
  question.cluster = cost::with_head_room(std::move(cluster), question.head_room);
}

std::optional<schedule::Schedule> broken_order(const Plan& plan, const Question& question) {
  if (plan.order.empty()) return std::nullopt;
  const auto actions = schedule_of(plan, question.micro_batches, question.model.frozen_layers());
  if (!actions) return std::nullopt;  // it is for another number of micro-batches
  schedule::Schedule lowered = schedule::lower(*actions);
  if (!schedule::find_fault(lowered)) return std::nullopt;
  return lowered;
}

Expected<void> set_from(Question& question, Plan from, std::string_view origin) {
  if (from.layers() != question.model.size()) {
    return make_error(ErrorCode::kBadInput,
                      "{}: the plan has {} layers, the model {}: wanted a plan for this model",
                      origin, from.layers(), question.model.size());
  }
  for (const PlanStage& stage : from.stages) {
    if (stage.rank.value < question.cluster.size()) continue;
    return make_error(ErrorCode::kBadInput,
                      "{}: the plan uses rank {}, but {} ranks are offered: offer at least as many "
                      "(packing leaves ranks idle)",
                      origin, stage.rank, question.cluster.size());
  }
  from.ranks = question.cluster.size();
  if (!from.order.empty()) from.order.resize(static_cast<std::size_t>(from.ranks));
  if (const auto broken = broken_order(from, question)) {
    return make_error(ErrorCode::kBadInput, "{}: /order cannot run: {}", origin,
                      schedule::find_fault(*broken)->message);
  }
  question.from = std::move(from);
  return {};
}

Expected<Answer> answer(const Question& question) {
  auto found = find_proposal(question, question.model);
  if (!found) {
    Error error = found.error();
    if (error.code == ErrorCode::kInfeasible) error.message += what_is_lacking(question);
    return error;
  }
  Answer given{.proposal = *std::move(found),
               .costs = {},
               .evaluation = {},
               .migration = {},
               .traffic = {},
               .advice = {},
               .joined_head = {},
               .document = {}};
  given.costs = recomputed(question.model, given.proposal.recomputed);
  DYNMO_ASSIGN(given.evaluation,
               evaluate_recomputed(given.proposal.plan,
                                   {question.model, question.cluster, question.micro_batches},
                                   given.proposal.recomputed, {.timeline = true}));
  if (question.from) {
    given.migration = difference(*question.from, given.proposal.plan, question.model);
  }
  if (question.form) DYNMO_TRY(check_emit(*question.form, emit_problem(question, given)));
  given.joined_head = joined_head(question, given);
  given.traffic = traffic_of(question, given);
  given.advice = advice_on(question, given);
  given.document = document_of(question, given);
  return given;
}

EmitProblem emit_problem(const Question& question, const Answer& answer) {
  return {.plan = answer.proposal.plan,
          .model = question.model,
          .micro_batches = question.micro_batches,
          .recomputed = answer.proposal.recomputed,
          .parallelism = question.parallelism,
          .shape = question.shape};
}

}  // namespace dynmo::plan
