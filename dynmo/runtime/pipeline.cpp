// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/pipeline.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>

#include "dynmo/core/check.h"
#include "dynmo/core/digest.h"
#include "dynmo/model/memory.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/transport/tags.h"

namespace dynmo::runtime {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Control uses of a pipeline, from kFirstPipelineUse + kUses * lane on.
enum Use { kExchange, kDigest, kLoss, kVote, kUses };

std::span<const std::byte> as_bytes(const std::vector<double>& values) {
  return std::as_bytes(std::span(values));
}

std::vector<double> as_doubles(const std::vector<std::byte>& bytes) {
  std::vector<double> values(bytes.size() / sizeof(double));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(double));
  return values;
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double busy_time(const std::vector<schedule::TimedAction>& actions) {
  double sum = 0;
  for (const auto& timed : actions) sum += to_seconds(timed.end - timed.start);
  return sum;
}

// What is known of the layers before anything is measured: names and bytes.
cost::ModelCost known_costs(const model::Model& model,
                            const std::vector<std::int64_t>& boundary_shape) {
  std::int64_t boundary = sizeof(float);
  for (const std::int64_t size : boundary_shape) boundary *= size;
  cost::ModelCost costs;
  for (const auto& layer : model) {
    cost::LayerCost known;
    known.name = layer->name();
    known.parameter_bytes = known.gradient_bytes = model::parameter_bytes(*layer);
    known.optimizer_bytes = known.parameter_bytes * 2;
    known.boundary_bytes = Bytes{boundary};
    costs.layers.push_back(std::move(known));
  }
  return costs;
}

model::LayerState copy_of(const model::LayerState& state) {
  model::LayerState copy = state;
  for (model::Parameter& parameter : copy.parameters) {
    for (at::Tensor* tensor : {&parameter.value, &parameter.gradient, &parameter.first_moment,
                               &parameter.second_moment}) {
      *tensor = tensor->clone();
    }
  }
  return copy;
}

schedule::Schedule checked(const schedule::Schedule& compute) {
  schedule::Schedule lowered = schedule::lower(compute);
  const auto facts = schedule::check(lowered);
  DYNMO_CHECK(facts.has_value(), "a schedule that runs to its end: {}", facts.error().message);
  return lowered;
}

}  // namespace

// One vector of doubles a rank: six of every layer and the losses (read from their owner), then the
// rank's own.
struct Pipeline::Exchange {
  std::vector<LayerSample> layers;
  std::vector<double> squared_norms;  // of the gradients, by layer
  std::vector<double> losses;         // by micro-batch
  std::vector<double> busy_s;         // by rank
  double overhead_s = 0;              // least of any rank: the others' contains their waiting
  double plan_s = 0;                  // largest of any rank
  double migrate_s = 0;
};

LayerStates initial_states(const model::Model& model, const plan::Plan& plan, Rank rank,
                           std::uint64_t seed) {
  LayerStates states;
  for (int i = 0; i < plan.layers(); ++i) {
    const LayerId id(i);
    if (plan.owner(id) == rank) states.emplace(id, model::make_state(*model[id.index()], id, seed));
  }
  return states;
}

transport::Tag Pipeline::control(int use) const {
  return transport::control_tag(kFirstPipelineUse + kUses * options_.lane + use);
}

Pipeline::Pipeline(transport::Transport& transport, model::Model model, PipelineOptions options,
                   plan::Plan plan, LayerStates states, std::int64_t first_step)
    : transport_(transport),
      model_(std::move(model)),
      options_(std::move(options)),
      plan_(std::move(plan)),
      states_(std::move(states)),
      step_(first_step),
      cluster_(cost::equal_ranks(transport.size())),
      profiler_(known_costs(model_, options_.boundary_shape), options_.profile_window),
      last_change_(first_step) {
  const auto valid = plan::validate(plan_, static_cast<int>(model_.size()));
  DYNMO_CHECK(valid.has_value() && plan_.ranks == transport_.size(),
              "a plan for this model and group, got {}: {}", plan::to_string(plan_),
              valid.has_value() ? "" : valid.error().message);
  freeze_prefix();
  planned_frozen_ = frozen_;
  build_schedules();
}

// The frozen prefix is a function of the step, so all ranks agree on it without a message.
void Pipeline::freeze_prefix() {
  if (!options_.freezing) return;
  const int layers = static_cast<int>(model_.size());
  const int frozen = dynamism::frozen_layers(*options_.freezing, step_, options_.steps, layers);
  if (frozen == frozen_) return;
  frozen_ = frozen;
  prediction_due_ = true;
  for (auto& [id, state] : states_) {
    if (id.value >= frozen_) break;
    if (!state.frozen) model::freeze(state);
    update_s_[id] = 0;
  }
}

void Pipeline::build_schedules() {
  const auto shape = plan::shape_of(plan_, options_.micro_batches, frozen_);
  training_ = checked(plan::schedule_of(plan_, options_.micro_batches, frozen_).value());
  validation_ = checked(schedule::make_forward_schedule(shape).value());
}

std::optional<cost::ModelCost> Pipeline::costs() const { return profiler_.costs(frozen_); }

void Pipeline::predict() {
  prediction_due_ = false;
  predicted_s_ = 0;
  if (const auto model = costs()) {
    const auto evaluation = plan::evaluate(plan_, *model, cluster_, options_.micro_batches);
    if (evaluation) predicted_s_ = evaluation->step_time_s + overhead_s_;
  }
}

Expected<void> Pipeline::balance(StepReport& report) {
  if (options_.balancing == Balancing::kNever || profiler_.steps() < 3) return {};
  auto start = Clock::now();
  const auto model = costs();
  const double noise = profiler_.relative_noise();
  report.profile_s = seconds_since(start);
  // A search takes about a second: only where something has changed since the last one.
  if (options_.policy.balancer == plan::Balancer::kSearch && planned_for_ &&
      planned_for_->frozen_layers() == model->frozen_layers() &&
      !plan::costs_moved(*planned_for_, *model, plan_, options_.micro_batches, noise,
                         options_.policy.noise_factor)) {
    return {};
  }
  start = Clock::now();
  // A plan is expected to last as long as the one before it did.
  const auto left = static_cast<double>(options_.steps - step_);
  const auto lasted = static_cast<double>(step_ - last_change_);
  const plan::PolicyInput input{
      .current = plan_,
      .model = *model,
      .relative_noise = noise,
      .cluster = cluster_,
      .micro_batches = options_.micro_batches,
      .horizon_steps = std::min(left, std::max(lasted, 10.0)),
      .bytes_per_s =
          migrate_cost_s_ > 0 ? static_cast<double>(migrated_.value) / migrate_cost_s_ : 0,
      .fixed_cost_s = plan_cost_s_,
      .change = frozen_ == planned_frozen_ ? plan::Change::kMeasured : plan::Change::kKnown};
  DYNMO_ASSIGN(report.decision, plan::decide(input, options_.policy));
  planned_for_ = *model;
  report.plan_s = own_plan_s_ = seconds_since(start);
  if (!report.decision->migrate) return {};
  start = Clock::now();
  const plan::Migration migration = plan::difference(plan_, report.decision->plan, *model);
  DYNMO_ASSIGN(const bool moved, apply(report.decision->plan));
  report.migrate_s = seconds_since(start);
  if (moved) {
    report.moved_layers = static_cast<int>(migration.moves.size());
    report.moved_bytes = migration.bytes();
  }
  return {};
}

Expected<bool> Pipeline::apply(const plan::Plan& plan) {
  DYNMO_TRY(plan::validate(plan, static_cast<int>(model_.size())));
  DYNMO_TRY(plan::schedule_of(plan, options_.micro_batches, frozen_));
  // Every rank derived the plan by itself; a difference is a defect, caught before anything moves.
  const std::string mine = plan::digest(plan).hex();
  DYNMO_ASSIGN(const auto all,
               transport::all_gather(transport_, control(kDigest), std::as_bytes(std::span(mine))));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const std::string_view theirs(reinterpret_cast<const char*>(all[rank].data()),
                                  all[rank].size());
    if (theirs != mine) {
      return make_error(ErrorCode::kInternal, "rank {} derived plan {}, rank {} derived {}",
                        transport_.rank(), mine, rank, theirs);
    }
  }
  const plan::Migration migration =
      plan::difference(plan_, plan, dynamism::freeze_prefix(profiler_.known(), frozen_));
  DYNMO_ASSIGN(migration_,
               migrate(transport_, control(kVote), model_, migration, states_, frozen_));
  if (!migration_.committed) return false;
  migrated_ = migration.bytes();
  plan_ = plan;
  last_change_ = step_;
  planned_frozen_ = frozen_;
  prediction_due_ = true;
  build_schedules();
  return true;
}

Expected<Pipeline::Exchange> Pipeline::exchange(const StepOutput& output) {
  const std::size_t layers = model_.size();
  const auto micro_batches = static_cast<std::size_t>(options_.micro_batches);
  constexpr std::size_t kPerLayer = 6;
  std::vector<double> mine(kPerLayer * layers + micro_batches + 4, 0.0);
  for (const auto& [id, state] : states_) {
    double* layer = &mine[kPerLayer * id.index()];
    const auto times = output.layer_times.find(id);
    const LayerTime time =
        times == output.layer_times.end() ? LayerTime{} : mean_time(times->second);
    layer[0] = time.forward_s;
    layer[1] = time.input_gradient_s;
    layer[2] = time.weight_gradient_s;
    layer[3] = update_s_[id];
    layer[4] = state.frozen ? 0.0 : model::squared_norm(state);
    const auto stash = output.stash_bytes.find(id);
    layer[5] = stash == output.stash_bytes.end() ? 0.0 : static_cast<double>(stash->second.value);
  }
  std::copy(output.losses.begin(), output.losses.end(),
            mine.begin() + static_cast<std::ptrdiff_t>(kPerLayer * layers));
  double* own = &mine[kPerLayer * layers + micro_batches];
  own[0] = busy_time(output.actions) + update_total_s_;
  own[1] = step_s_ - update_total_s_;
  own[2] = own_plan_s_;
  own[3] = migration_.seconds;

  DYNMO_ASSIGN(const auto gathered,
               transport::all_gather(transport_, control(kExchange), as_bytes(mine)));
  std::vector<std::vector<double>> all;
  for (const auto& bytes : gathered) all.push_back(as_doubles(bytes));

  Exchange exchange;
  for (std::size_t i = 0; i < layers; ++i) {
    const double* layer = &all[plan_.owner(LayerId(static_cast<int>(i))).index()][kPerLayer * i];
    exchange.layers.push_back({.time = {layer[0], layer[1], layer[2]},
                               .update_s = layer[3],
                               .stash_bytes = Bytes{static_cast<std::int64_t>(layer[5])}});
    exchange.squared_norms.push_back(layer[4]);
  }
  const std::vector<double>& last = all[plan_.stages.back().rank.index()];
  exchange.losses.assign(
      last.begin() + static_cast<std::ptrdiff_t>(kPerLayer * layers),
      last.begin() + static_cast<std::ptrdiff_t>(kPerLayer * layers + micro_batches));
  exchange.overhead_s = all[0][kPerLayer * layers + micro_batches + 1];
  for (const auto& rank : all) {
    const double* theirs = &rank[kPerLayer * layers + micro_batches];
    exchange.busy_s.push_back(theirs[0]);
    exchange.overhead_s = std::min(exchange.overhead_s, theirs[1]);
    exchange.plan_s = std::max(exchange.plan_s, theirs[2]);
    exchange.migrate_s = std::max(exchange.migrate_s, theirs[3]);
  }
  return exchange;
}

// Every rank has the same loss and norms, so all stop or skip alike.
Expected<void> Pipeline::check_numbers(StepReport& report,
                                       const std::vector<double>& squared_norms) const {
  if (std::isfinite(report.loss) && std::isfinite(report.gradient_norm)) return {};
  report.skipped = options_.on_nan == OnNan::kSkip;
  if (report.skipped) return {};
  std::string where;
  for (std::size_t i = 0; i < squared_norms.size(); ++i) {
    if (std::isfinite(squared_norms[i])) continue;
    const LayerId layer(static_cast<std::int32_t>(i));
    where = fmt::format(", first in the gradient of layer {} ('{}') on rank {}", layer,
                        model_[i]->name(), plan_.owner(layer));
    break;
  }
  return make_error(ErrorCode::kBadInput,
                    "step {}: loss is {} and gradient norm {}{}: lower optimizer.learning_rate, or "
                    "pass over such steps with train.on_nan = skip",
                    report.step, std::abs(report.loss), report.gradient_norm, where);
}

void Pipeline::update(StepReport& report) {
  const double factor =
      options_.clip_norm > 0 ? model::clip_factor(report.gradient_norm, options_.clip_norm) : 1.0;
  model::AdamWOptions optimizer = options_.optimizer;
  optimizer.learning_rate = report.learning_rate;
  const auto start = Clock::now();
  for (auto& [id, state] : states_) {
    if (state.frozen) continue;
    const auto begin = Clock::now();
    if (!report.skipped) {
      model::scale_gradients(state, factor);
      model::update(state, optimizer);
    }
    model::zero_gradients(state);
    update_s_[id] = seconds_since(begin);
  }
  update_total_s_ = seconds_since(start);
}

Expected<StepOutput> Pipeline::run_step(const Batches& batches, bool meter_stashes) {
  const StepInput input{
      .lowered = training_,
      .plan = plan_,
      .step = step_,
      .frozen_layers = frozen_,
      .meter_stashes = meter_stashes,
      .boundary_shape = options_.boundary_shape,
      .batch = [&](MicroBatchId micro_batch) { return batches(step_, micro_batch); }};
  return run_schedule(transport_, options_.lane, model_, input, states_);
}

void Pipeline::use(const Profiler& measured) {
  profiler_ = measured;
  prediction_due_ = true;
}

Expected<void> Pipeline::measure(const Batches& batches, int steps) {
  for (int i = 0; i < steps; ++i) {
    // The first one warms up caches and allocators: it is metered, not timed.
    DYNMO_ASSIGN(const StepOutput output, run_step(batches, /*meter_stashes=*/i == 0));
    for (auto& [id, state] : states_) {
      if (state.frozen) continue;
      model::zero_gradients(state);
      // The update is timed on a copy: measuring changes no number of the run.
      model::LayerState copy = copy_of(state);
      const auto begin = Clock::now();
      model::scale_gradients(copy, 1.0);
      model::update(copy, options_.optimizer);
      model::zero_gradients(copy);
      update_s_[id] = seconds_since(begin);
    }
    DYNMO_ASSIGN(const Exchange exchanged, exchange(output));
    profiler_.add(exchanged.layers);
    if (i == 0) profiler_.forget_times();
  }
  prediction_due_ = true;
  return {};
}

Expected<StepReport> Pipeline::step(const Batches& batches) {
  check_context() = {transport_.rank().value, step_};
  const auto start = Clock::now();
  StepReport report;
  report.step = step_;
  const int frozen_before = frozen_;
  freeze_prefix();
  DYNMO_TRY(balance(report));
  if (frozen_ != frozen_before) build_schedules();
  if (prediction_due_) predict();
  report.predicted_s = predicted_s_;
  report.frozen_layers = frozen_;
  const auto ready = Clock::now();

  DYNMO_ASSIGN(StepOutput output, accumulate(batches));
  const double schedule_s = seconds_since(ready);
  DYNMO_ASSIGN(const Exchange exchanged, exchange(output));
  double squared = 0;
  for (const double layer : exchanged.squared_norms) squared += layer;
  report.loss = mean(exchanged.losses);
  report.gradient_norm = std::sqrt(squared);
  report.learning_rate = model::learning_rate(options_.learning_rate, step_);
  DYNMO_TRY(check_numbers(report, exchanged.squared_norms));
  update(report);

  report.step_s = seconds_since(start);
  step_s_ = seconds_since(ready) - schedule_s;
  overhead_s_ = exchanged.overhead_s;
  plan_cost_s_ = exchanged.plan_s;
  migrate_cost_s_ = exchanged.migrate_s;
  profiler_.add(exchanged.layers);
  report.busy_s = exchanged.busy_s;
  report.imbalance =
      *std::max_element(report.busy_s.begin(), report.busy_s.end()) / mean(report.busy_s) - 1;
  report.bubble = 1 - mean(report.busy_s) / report.step_s;
  report.layers = exchanged.layers;
  report.actions = std::move(output.actions);
  report.messages = std::move(output.messages);
  report.start_ns = output.start_ns;
  ++step_;
  return report;
}

Expected<double> Pipeline::validate(const Batches& batches) {
  const StepInput input{
      .lowered = validation_,
      .plan = plan_,
      .step = step_,
      .frozen_layers = static_cast<int>(model_.size()),
      .training = false,
      .boundary_shape = options_.boundary_shape,
      .batch = [&](MicroBatchId micro_batch) { return batches(step_, micro_batch); }};
  DYNMO_ASSIGN(const StepOutput output,
               run_schedule(transport_, options_.lane, model_, input, states_));
  std::vector<double> losses(static_cast<std::size_t>(options_.micro_batches), 0.0);
  std::copy(output.losses.begin(), output.losses.end(), losses.begin());
  DYNMO_ASSIGN(const auto all, transport::all_gather(transport_, control(kLoss), as_bytes(losses)));
  return mean(as_doubles(all[plan_.stages.back().rank.index()]));
}

}  // namespace dynmo::runtime
