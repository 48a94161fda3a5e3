// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/pipeline.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <set>

#include "dynmo/core/check.h"
#include "dynmo/core/digest.h"
#include "dynmo/model/memory.h"
#include "dynmo/model/recompute.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/runtime/device_clock.h"
#include "dynmo/runtime/measure.h"
#include "dynmo/runtime/reduction.h"
#include "dynmo/runtime/ties.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/subset.h"
#include "dynmo/transport/tags.h"

namespace dynmo::runtime {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Control uses of a pipeline, from kFirstPipelineUse + kUses * lane on.
enum Use { kExchange, kDigest, kLoss, kVote, kPing, kUses };

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double busy_time(const std::vector<schedule::TimedAction>& actions) {
  double sum = 0;
  for (const auto& timed : actions) sum += to_seconds(timed.end - timed.start);
  return sum;
}

// What is known of the layers before anything is measured: names and bytes.
cost::ModelCost known_costs(const model::Model& model, const PipelineOptions& options) {
  auto boundary = static_cast<std::int64_t>(c10::elementSize(options.boundary_type));
  for (const std::int64_t size : options.boundary_shape) boundary *= size;
  cost::ModelCost costs;
  for (const auto& layer : model) {
    cost::LayerCost known;
    known.name = layer->name();
    known.parameter_bytes = known.gradient_bytes = model::parameter_bytes(*layer);
    known.optimizer_bytes = known.parameter_bytes * 2;
    known.copy_bytes = model::copy_bytes(*layer);
    known.boundary_bytes = Bytes{boundary};
    costs.layers.push_back(std::move(known));
  }
  return costs;
}

model::LayerState copy_of(const model::LayerState& state) {
  model::LayerState copy = state;
  for (model::Parameter& parameter : copy.parameters) {
    for (at::Tensor* tensor : {&parameter.value, &parameter.gradient, &parameter.first_moment,
                               &parameter.second_moment, &parameter.rounded}) {
      if (tensor->defined()) *tensor = tensor->clone();
    }
  }
  return copy;
}

// Adds what one more round of a step's schedule did; `first` is the number of its first micro-batch
// among this replica's.
void append(StepOutput& step, StepOutput round, int first) {
  if (step.start_ns == 0) {
    step = std::move(round);
    return;
  }
  step.seconds += round.seconds;
  step.waiting_s += round.waiting_s;
  step.losses.insert(step.losses.end(), round.losses.begin(), round.losses.end());
  for (const auto& [layer, times] : round.layer_times) {
    auto& all = step.layer_times[layer];
    all.insert(all.end(), times.begin(), times.end());
  }
  const Nanoseconds later{round.start_ns - step.start_ns};
  const auto append_to = [&](std::vector<schedule::TimedAction>& all,
                             const std::vector<schedule::TimedAction>& more) {
    for (schedule::TimedAction timed : more) {
      timed.action.micro_batch = MicroBatchId(first + timed.action.micro_batch.value);
      timed.start += later;
      timed.end += later;
      all.push_back(timed);
    }
  };
  append_to(step.actions, round.actions);
  append_to(step.messages, round.messages);
}

// Seconds of a rank's actions that no layer took, nor waiting.
double beside_layers_s(const StepOutput& output) {
  double layers = 0;
  for (const auto& [layer, times] : output.layer_times) {
    for (const LayerTime& time : times) {
      layers += time.forward_s + time.input_gradient_s + time.weight_gradient_s;
    }
  }
  return output.seconds - output.waiting_s - layers;
}

schedule::Schedule checked(const schedule::Schedule& compute) {
  schedule::Schedule lowered = schedule::lower(compute);
  const auto facts = schedule::check(lowered);
  DYNMO_CHECK(facts.has_value(), "a schedule that runs to its end: {}", facts.error().message);
  return lowered;
}

// Who sends to whom on which channel of a lowered schedule; ranks are those of the pipeline.
std::set<Channel> channels_of(const schedule::Schedule& lowered, int lane) {
  std::set<Channel> channels;
  for (const auto& actions : lowered.ranks) {
    for (const schedule::Action& action : actions) {
      if (action.kind != schedule::ActionKind::kSendActivation &&
          action.kind != schedule::ActionKind::kSendGradient) {
        continue;
      }
      const auto rank = [&](const schedule::Action& end) {
        return lowered.shape.stages[end.stage.index()].rank;
      };
      channels.insert({rank(action), rank(schedule::peer(action)),
                       transport::schedule_tag(lane, schedule::channel(action))});
    }
  }
  return channels;
}

}  // namespace

LayerStates initial_states(const model::Model& model, const plan::Plan& plan, Rank rank,
                           std::uint64_t seed, const std::vector<model::Tie>& ties) {
  LayerStates states;
  for (int i = 0; i < plan.layers(); ++i) {
    const LayerId id(i);
    if (plan.owner(id) == rank) states.emplace(id, model::make_state(*model[id.index()], id, seed));
  }
  take_initial_values(ties, model, seed, states);
  return states;
}

transport::Tag Pipeline::control(int use) const {
  return transport::control_tag(kFirstPipelineUse + kUses * options_.lane + use);
}

Pipeline::Pipeline(transport::Transport& transport, model::Model model, PipelineOptions options,
                   plan::Plan plan, LayerStates states, std::int64_t first_step)
    : grid_(transport, options.replicas),
      model_(std::move(model)),
      options_(std::move(options)),
      plan_(std::move(plan)),
      states_(std::move(states)),
      step_(first_step),
      cluster_(cost::equal_ranks(grid_.ranks(), options_.memory)),
      profiler_(known_costs(model_, options_), options_.profile_window),
      last_change_(first_step) {
  const auto valid = plan::validate(plan_, static_cast<int>(model_.size()));
  DYNMO_CHECK(valid.has_value() && plan_.ranks == grid_.ranks(),
              "a plan for this model and {} ranks, got {}: {}", grid_.ranks(),
              plan::to_string(plan_), valid.has_value() ? "" : valid.error().message);
  const auto tied = check_ties(options_.ties, model_, options_.freezing.has_value());
  DYNMO_CHECK(tied.has_value(), "ties of this model: {}", tied.error().message);
  for (auto& [id, state] : states_) {
    state = model::on_device(std::move(state), options_.staging.device);
  }
  if (options_.channels != nullptr) {
    std::vector<Rank> ranks;
    for (int i = 0; i < grid_.ranks(); ++i) {
      ranks.push_back(grid_.world_rank(grid_.replica(), Rank(i)));
    }
    device_messages_ = transport::subset(*options_.channels, std::move(ranks));
  }
  freeze_prefix();
  planned_frozen_ = frozen_;
  build_schedules();
  if (options_.recompute == plan::Recompute::kWhole) {
    recompute(recomputed_under(plan_).value());
  } else {
    running_ = model_;
  }
}

// Of costs that all ranks have alike; none before anything was measured (kAuto).
Expected<plan::LayerSet> Pipeline::recomputed_under(const plan::Plan& plan) const {
  auto known = profiler_.costs(frozen_);
  if (!known && options_.recompute != plan::Recompute::kWhole) return plan::LayerSet();
  if (!known) known = dynamism::freeze_prefix(profiler_.known(), frozen_);
  return plan::recomputed_layers(options_.recompute, plan, *known, cluster_,
                                 options_.micro_batches);
}

void Pipeline::recompute(plan::LayerSet layers) {
  recomputed_ = std::move(layers);
  running_ = model_;
  for (const LayerId id : recomputed_) running_[id.index()] = model::recomputed(model_[id.index()]);
}

// The frozen prefix is a function of the step, so all ranks agree on it without a message.
void Pipeline::freeze_prefix() {
  if (!options_.freezing) return;
  const int layers = static_cast<int>(model_.size());
  const int frozen = dynamism::frozen_layers(*options_.freezing, step_, options_.steps, layers);
  if (frozen == frozen_) return;
  frozen_ = frozen;
  profiler_.shorten();
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
  channels_due_ = options_.channels != nullptr;
}

// All ranks have the same schedules, come here at the same points, and open channels in one order.
Expected<void> Pipeline::open_channels() {
  if (!channels_due_) return {};
  channels_due_ = false;
  std::set<Channel> channels = channels_of(training_, options_.lane);
  channels.merge(channels_of(validation_, options_.lane));
  std::vector<Channel> of_group;
  for (int replica = 0; replica < grid_.replicas(); ++replica) {
    for (const Channel& channel : channels) {
      of_group.push_back({grid_.world_rank(replica, channel.from),
                          grid_.world_rank(replica, channel.to), channel.tag});
    }
  }
  return options_.channels->open(of_group);
}

std::optional<cost::ModelCost> Pipeline::costs() const { return profiler_.costs(frozen_); }

// Costs under which `accumulation` replays of the schedule take as long as a step: the update, once
// a step, is shared out over them.
std::optional<cost::ModelCost> Pipeline::round_costs() const {
  auto model = costs();
  if (!model) return model;
  for (cost::LayerCost& layer : model->layers) layer.update_s /= options_.accumulation;
  return model;
}

// What was measured beside the layers, for all that is predicted from now on.
void Pipeline::take_measures() {
  const StepSample& beside = profiler_.beside();
  cluster_.action_s = beside.action_s.value_or(0);
  cluster_.inside_node.latency_s = beside.message_s.value_or(0);
  if (!beside.reduction_bytes_per_s) return;
  cluster_.replicas = grid_.replicas();
  // Of `accumulation` replays of the schedule one reduces.
  cluster_.between_replicas.bandwidth_bytes_per_s =
      options_.accumulation * *beside.reduction_bytes_per_s;
}

double Pipeline::predicted_step_s() const {
  const auto model = round_costs();
  if (!model) return 0;
  const auto evaluation = plan::evaluate(plan_, plan::recomputed(*model, recomputed_), cluster_,
                                         options_.micro_batches);
  if (!evaluation) return 0;
  return options_.accumulation * evaluation->step_time_s +
         profiler_.beside().overhead_s.value_or(0);
}

Expected<void> Pipeline::balance(StepReport& report) {
  if (options_.balancing == Balancing::kNever || profiler_.steps() < 3) return {};
  auto start = Clock::now();
  // Plans are compared with the layers recomputed that are now; the one taken gets its own set.
  auto model = round_costs();
  if (model) model = plan::recomputed(*std::move(model), recomputed_);
  const double noise = profiler_.relative_noise();
  report.profile_s += seconds_since(start);
  // A search takes about a second: only where something has changed since the last one.
  if (options_.policy.balancer == plan::Balancer::kSearch && planned_for_ &&
      planned_for_->frozen_layers() == model->frozen_layers() &&
      !plan::costs_moved(*planned_for_, *model, plan_, options_.micro_batches, noise,
                         options_.policy.noise_factor, profiler_.rank_noise())) {
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
      .horizon_steps = options_.accumulation * std::min(left, std::max(lasted, 10.0)),
      .bytes_per_s =
          migrate_cost_s_ > 0 ? static_cast<double>(migrated_.value) / migrate_cost_s_ : 0,
      .fixed_cost_s = plan_cost_s_,
      .change = frozen_ == planned_frozen_ ? plan::Change::kMeasured : plan::Change::kKnown,
      .rank_noise = profiler_.rank_noise()};
  DYNMO_ASSIGN(report.decision, plan::decide(input, options_.policy));
  for (double* time : {&report.decision->current_step_s, &report.decision->planned_step_s,
                       &report.decision->noise_s}) {
    *time *= options_.accumulation;
  }
  planned_for_ = *model;
  report.plan_s = own_plan_s_ = seconds_since(start);
  if (!report.decision->migrate) {
    planned_frozen_ = frozen_;
    return {};
  }
  if (const auto layers = recomputed_under(report.decision->plan); !layers) {
    report.decision->migrate = false;
    report.decision->reason =
        fmt::format("keep {}: {}", plan::to_string(plan_), layers.error().message);
    return {};
  }
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
  DYNMO_ASSIGN(plan::LayerSet layers, recomputed_under(plan));
  std::string agreed = plan::digest(plan).hex();
  for (const LayerId id : layers) agreed += fmt::format(" recompute {}", id);
  const std::string mine = digest_of(agreed).hex();
  DYNMO_ASSIGN(const auto all, transport::all_gather(grid_.world(), control(kDigest),
                                                     std::as_bytes(std::span(mine))));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const std::string_view theirs(reinterpret_cast<const char*>(all[rank].data()),
                                  all[rank].size());
    if (theirs != mine) {
      return make_error(ErrorCode::kInternal, "rank {} derived plan {}, rank {} derived {}",
                        grid_.world().rank(), mine, rank, theirs);
    }
  }
  const plan::Migration migration =
      plan::difference(plan_, plan, dynamism::freeze_prefix(profiler_.known(), frozen_));
  DYNMO_ASSIGN(migration_, migrate(grid_.pipeline(), grid_.world(), control(kVote), model_,
                                   migration, states_, frozen_, options_.staging));
  if (!migration_.committed) return false;
  migrated_ = migration.bytes();
  plan_ = plan;
  last_change_ = step_;
  planned_frozen_ = frozen_;
  build_schedules();
  recompute(std::move(layers));
  return true;
}

Expected<Exchange> Pipeline::exchange_figures(const StepOutput& output) {
  OwnFigures own;
  for (const auto& [id, state] : states_) {
    const auto times = output.layer_times.find(id);
    LayerTime time = times == output.layer_times.end() ? LayerTime{} : mean_time(times->second);
    // The second forward and the small stash are the plan's doing, not the layer's cost.
    const bool again = std::binary_search(recomputed_.begin(), recomputed_.end(), id);
    if (again) time.input_gradient_s = std::max(0.0, time.input_gradient_s - time.forward_s);
    const auto stash = output.stash_bytes.find(id);
    const bool metered = stash != output.stash_bytes.end() && !again;
    own.layers[id] = {.sample = {.time = time,
                                 .update_s = update_s_[id],
                                 .stash_bytes = metered ? stash->second : Bytes{0}},
                      .squared_norm = state.frozen ? 0.0 : squared_norm(options_.ties, state)};
  }
  own.losses = output.losses;
  own.busy_s = busy_time(output.actions) - reducing_s_ + update_total_s_;
  own.overhead_s = own_overhead_s_;
  own.plan_s = own_plan_s_;
  own.migrate_s = migration_.seconds;
  own.beside_s = std::max(0.0, beside_layers_s(output) - reducing_s_);
  own.actions = static_cast<double>(output.actions.size());
  own.message_s = own_message_s_;
  own.reduction_bytes_per_s = own_reduction_bytes_per_s_;
  return exchange(grid_, control(kExchange), plan_, options_.accumulation * options_.micro_batches,
                  own);
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
    where = fmt::format(", first in the gradient of layer {} ('{}') on {}", layer,
                        model_[i]->name(), grid_.name_of(plan_.owner(layer)));
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
  DeviceClock clock(options_.staging.device);
  std::map<LayerId, std::pair<DeviceClock::Mark, DeviceClock::Mark>> marks;
  for (auto& [id, state] : states_) {
    if (state.frozen) continue;
    const DeviceClock::Mark begin = clock.mark();
    if (report.skipped) {
      model::zero_gradients(state);
    } else {
      model::update(state, optimizer, factor);
    }
    marks[id] = {begin, clock.mark()};
  }
  const DeviceClock::Mark end = clock.mark();
  clock.finish();
  for (const auto& [id, mark] : marks) update_s_[id] = clock.seconds(mark.first, mark.second);
  update_total_s_ = clock.seconds(clock.start(), end);
}

StepInput Pipeline::round_input(const schedule::Schedule& lowered, const Batches& batches,
                                int round) const {
  const int of_replica = options_.accumulation * options_.micro_batches;
  return {.lowered = lowered,
          .plan = plan_,
          .step = step_,
          .frozen_layers = frozen_,
          .first_micro_batch = grid_.replica() * of_replica + round * options_.micro_batches,
          .step_micro_batches = grid_.replicas() * of_replica,
          .boundary_shape = options_.boundary_shape,
          .boundary_type = options_.boundary_type,
          .staging = options_.staging,
          .device_messages = device_messages_.get(),
          .batch = [&batches, step = step_](MicroBatchId id) { return batches(step, id); }};
}

Expected<StepOutput> Pipeline::accumulate(const Batches& batches) {
  DYNMO_TRY(open_channels());
  const auto start = Clock::now();
  Reduction reduction(grid_.peers(), states_, options_.staging);
  StepOutput output;
  for (int round = 0; round < options_.accumulation; ++round) {
    StepInput input = round_input(training_, batches, round);
    if (round + 1 == options_.accumulation) {
      input.gradient_ready = [&](LayerId layer) { reduction.start(layer); };
    }
    DYNMO_ASSIGN(StepOutput part,
                 run_schedule(grid_.pipeline(), options_.lane, running_, input, states_));
    append(output, std::move(part), round * options_.micro_batches);
  }
  reducing_s_ = reduction.seconds();
  schedule_s_ = seconds_since(start) - reducing_s_;
  DYNMO_TRY(reduction.finish());
  reduction_s_ = reduction.seconds();
  DYNMO_TRY(add_tied_gradients(grid_.pipeline(), options_.ties, plan_, states_, options_.staging));
  return output;
}

Expected<void> Pipeline::use(const Profiler& measured) {
  profiler_ = measured;
  DYNMO_ASSIGN(plan::LayerSet layers, recomputed_under(plan_));
  recompute(std::move(layers));
  return {};
}

Expected<void> Pipeline::measure(const Batches& batches, int steps) {
  DYNMO_TRY(open_channels());
  for (int i = 0; i < steps; ++i) {
    // The first one warms up caches and allocators: it is metered, not timed.
    StepInput input = round_input(training_, batches, 0);
    input.meter_stashes = i == 0;
    DYNMO_ASSIGN(const StepOutput output,
                 run_schedule(grid_.pipeline(), options_.lane, running_, input, states_));
    if (device_messages_ == nullptr) {  // else not on this transport
      DYNMO_ASSIGN(own_message_s_, message_time_s(grid_.pipeline(), control(kPing),
                                                  options_.boundary_shape, options_.boundary_type));
    }
    if (grid_.replicas() > 1) {
      DYNMO_ASSIGN(own_reduction_bytes_per_s_,
                   reduction_bytes_per_s(grid_.peers(), states_, options_.staging));
    }
    for (auto& [id, state] : states_) {
      if (state.frozen) continue;
      model::zero_gradients(state);
      // The update is timed on a copy: measuring changes no number of the run.
      model::LayerState copy = copy_of(state);
      DeviceClock clock(options_.staging.device);
      model::update(copy, options_.optimizer);
      const DeviceClock::Mark end = clock.mark();
      clock.finish();
      update_s_[id] = clock.seconds(clock.start(), end);
    }
    const auto begin = Clock::now();
    DYNMO_ASSIGN(const Exchange exchanged, exchange_figures(output));
    own_overhead_s_ = seconds_since(begin);
    profiler_.add(exchanged.layers, plan::owners(plan_), exchanged.beside);
    if (i == 0) profiler_.forget_times();
  }
  DYNMO_ASSIGN(plan::LayerSet layers, recomputed_under(plan_));
  recompute(std::move(layers));
  return {};
}

Expected<StepReport> Pipeline::step(const Batches& batches) {
  check_context() = {grid_.world().rank().value, step_};
  const auto start = Clock::now();
  StepReport report;
  report.step = step_;
  const int frozen_before = frozen_;
  freeze_prefix();
  take_measures();
  DYNMO_TRY(balance(report));
  if (frozen_ != frozen_before) {
    build_schedules();
    DYNMO_ASSIGN(plan::LayerSet layers, recomputed_under(plan_));
    recompute(std::move(layers));
  }
  const auto predicting = Clock::now();
  report.predicted_s = predicted_step_s();
  report.plan_s += seconds_since(predicting);
  report.frozen_layers = frozen_;
  const auto ready = Clock::now();

  DYNMO_ASSIGN(StepOutput output, accumulate(batches));
  report.reduction_s = reduction_s_;
  DYNMO_ASSIGN(const Exchange exchanged, exchange_figures(output));
  const auto met = Clock::now();
  double squared = 0;
  for (const double layer : exchanged.squared_norms) squared += layer;
  report.loss = mean(exchanged.losses);
  report.gradient_norm = std::sqrt(squared);
  report.learning_rate = model::learning_rate(options_.learning_rate, step_);
  DYNMO_TRY(check_numbers(report, exchanged.squared_norms));
  update(report);

  report.step_s = seconds_since(start);
  own_overhead_s_ = seconds_since(ready) - schedule_s_ - update_total_s_;
  if (cluster_.replicas > 1) own_overhead_s_ -= reduction_s_;  // which the replay knows
  plan_cost_s_ = exchanged.plan_s;
  migrate_cost_s_ = exchanged.migrate_s;
  const auto profiling = Clock::now();
  profiler_.add(exchanged.layers, plan::owners(plan_), exchanged.beside);
  report.profile_s += seconds_since(profiling);
  report.busy_s = exchanged.busy_s;
  report.imbalance =
      *std::max_element(report.busy_s.begin(), report.busy_s.end()) / mean(report.busy_s) - 1;
  // What busy_s is of: the time between two exchanges, where all ranks meet. The update before the
  // schedule lies in it, that behind it does not.
  const double between_s = after_exchange_s_ + std::chrono::duration<double>(met - start).count();
  after_exchange_s_ = seconds_since(met);
  report.bubble = 1 - mean(report.busy_s) / between_s;
  report.layers = exchanged.layers;
  report.actions = std::move(output.actions);
  report.messages = std::move(output.messages);
  report.start_ns = output.start_ns;
  ++step_;
  return report;
}

Expected<double> Pipeline::validate(const Batches& batches) {
  DYNMO_TRY(open_channels());
  std::vector<double> losses(
      static_cast<std::size_t>(options_.accumulation * options_.micro_batches), 0.0);
  for (int round = 0; round < options_.accumulation; ++round) {
    StepInput input = round_input(validation_, batches, round);
    input.frozen_layers = static_cast<int>(model_.size());
    input.training = false;
    DYNMO_ASSIGN(const StepOutput output,
                 run_schedule(grid_.pipeline(), options_.lane, running_, input, states_));
    std::copy(output.losses.begin(), output.losses.end(),
              losses.begin() + round * options_.micro_batches);
  }
  DYNMO_ASSIGN(const auto all, transport::gather_numbers(grid_.world(), control(kLoss), losses));
  std::vector<double> of_step;
  for (int replica = 0; replica < grid_.replicas(); ++replica) {
    const auto& theirs = all[grid_.world_rank(replica, plan_.stages.back().rank).index()];
    of_step.insert(of_step.end(), theirs.begin(), theirs.end());
  }
  return mean(of_step);
}

}  // namespace dynmo::runtime
