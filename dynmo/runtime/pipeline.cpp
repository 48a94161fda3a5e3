// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/pipeline.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/median.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/model/memory.h"
#include "dynmo/model/pruned.h"
#include "dynmo/runtime/device_clock.h"
#include "dynmo/runtime/engine.h"
#include "dynmo/runtime/known_costs.h"
#include "dynmo/runtime/queued_norms.h"
#include "dynmo/runtime/reduction.h"
#include "dynmo/runtime/row_messages.h"
#include "dynmo/runtime/side_copies.h"
#include "dynmo/runtime/snapshot.h"
#include "dynmo/runtime/ties.h"
#include "dynmo/runtime/update.h"

namespace dynmo::runtime {
namespace {

using Clock = std::chrono::steady_clock;

control::DecisionsOptions decisions_options(const PipelineOptions& options) {
  control::PolicyOptions policy = options.policy;
  policy.recompute = options.recompute;
  return {.controller = {.policy = policy,
                         .window = options.profile_window,
                         .micro_batches = options.micro_batches,
                         .accumulation = options.accumulation,
                         .steps = options.steps,
                         .release_after = options.release_after,
                         .min_ranks = options.min_ranks},
          .memory = options.memory,
          .replicas = options.replicas,
          .cluster = options.cluster};
}

control::DecisionsOptions decisions_options(const PipelineOptions& options,
                                            const transport::Grid& grid) {
  control::DecisionsOptions all = decisions_options(options);
  for (int p = 0; p < grid.positions(); ++p) all.names.push_back(grid.name_of(Rank(p)));
  return all;
}

// Sets the fields of the report that are equal on all ranks.
void take(const Exchange& exchanged, const transport::Grid& grid, const plan::Plan& plan,
          StepReport& report) {
  double squared = 0;
  for (const double layer : exchanged.squared_norms) squared += layer;
  report.loss = mean(exchanged.losses);
  report.gradient_norm = std::sqrt(squared);
  report.busy_by_rank = exchanged.busy_s;
  report.busy_s = exchanged.busy_s[grid.rank().index()];
  std::vector<Rank> positions;
  for (int i = 0; i < static_cast<int>(report.busy_by_rank.size()); ++i) {
    positions.push_back(grid.axes().place(WorldRank(i)).position);
  }
  report.imbalance = control::imbalance(report.busy_by_rank, positions, plan);
  report.layers = exchanged.layers;
  report.asked = exchanged.asked;
}

}  // namespace

control::Controller controller_of(RankState& state, const model::Model& model,
                                  const PipelineOptions& options) {
  if (state.controller) return *std::exchange(state.controller, std::nullopt);
  const cost::ModelCost known =
      known_costs(model, options, state.pruned, state.product_fit.value_or(cost::ProductFit()));
  control::Controller controller(known, decisions_options(options).controller, state.step);
  if (!state.controller_state.is_null()) {
    const auto restored = controller.restore(std::exchange(state.controller_state, nullptr));
    DYNMO_CHECK(restored.has_value(), "a controller as the others have: {}",
                restored.error().message);
  }
  return controller;
}

transport::Tag Pipeline::control(transport::Control use) const {
  return transport::control_tag(use, options_.lane);
}

control::Decisions::Now Pipeline::now() const {
  return {state_.plan, state_.step, state_.frozen_layers, program_.recomputed};
}

Pipeline::Pipeline(transport::Transport& transport, model::Model model, PipelineOptions options,
                   RankState state)
    : grid_(transport, options.replicas),
      model_(std::move(model)),
      options_(std::move(options)),
      state_(std::move(state)),
      asked_{.goes_on = state_.controller || !state_.controller_state.is_null()},
      decisions_(controller_of(state_, model_, options_), grid_.positions(),
                 decisions_options(options_, grid_)),
      // The host must read the size of a message with rows.
      device_messages_(grid_, model::drops_rows(model_) ? nullptr : options_.channels),
      room_(whole_room(model_, options_.boundary_shape)) {
  const plan::Plan& plan = state_.plan;
  const auto valid = plan::validate(plan, static_cast<int>(model_.size()));
  DYNMO_CHECK(valid.has_value() && plan.ranks == grid_.positions(),
              "a plan for this model and {} ranks, got {}: {}", grid_.positions(),
              plan::to_string(plan), valid.has_value() ? "" : valid.error().message);
  if (state_.sources.empty() && options_.make_sources) {
    state_.sources = options_.make_sources(options_.steps);
    if (!state_.source_state.is_null()) {
      const auto known = dynamism::restore(state_.sources, state_.source_state);
      DYNMO_CHECK(known.has_value(), "sources as the others have: {}", known.error().message);
    }
  }
  const auto fit = dynamism::check(state_.sources, {.model = model_, .ties = options_.ties});
  DYNMO_CHECK(fit.has_value(), "sources for this model: {}", fit.error().message);
  const auto tied = check_ties(options_.ties, model_);
  DYNMO_CHECK(tied.has_value(), "ties of this model: {}", tied.error().message);
  Staging& staging = options_.staging;
  for (auto& [id, layer] : state_.layers) {
    layer = model::on_device(std::move(layer), staging.device);
  }
  if (!staging.device.is_cpu() && !staging.beside) {
    staging.beside = std::make_shared<SideCopies>(staging.device);
  }
  const bool whole = options_.recompute == plan::Recompute::kWhole;
  remake_program(whole ? decisions_.recomputed_under(plan, state_.frozen_layers).value()
                       : plan::LayerSet());
}

RankState Pipeline::take_state() {
  begun_.reset();
  // Keeps copies of a step that was not finished. Those of a finished step already are spares.
  if (move_.running && !move_.running->agreed) {
    keep_as_spares(move_.running->transfer.arrived(), state_);
  }
  if (move_.running) decisions_.not_moved();
  move_.running.reset();
  for (auto& [id, layer] : state_.layers) {
    if (!layer.frozen) model::zero_gradients(layer);
  }
  state_.controller = decisions_.take_controller();
  return std::move(state_);
}

void Pipeline::remake_program(plan::LayerSet recomputed) {
  program_ = make_program(model_, state_, options_.micro_batches, std::move(recomputed));
  device_messages_.schedules_changed();
}

Expected<void> Pipeline::choose_recomputed() {
  DYNMO_ASSIGN(plan::LayerSet layers,
               decisions_.recomputed_under(state_.plan, state_.frozen_layers));
  recompute(program_, model_, std::move(layers));
  return {};
}

Expected<Exchange> Pipeline::exchange_figures() {
  DYNMO_CHECK(gradients_complete(), "a step that was begun");
  const StepOutput& output = begun_->output;
  RankStats own = own_figures(state_.layers, output, times_, program_.recomputed, options_.ties);
  const model::OutputShapes shapes =
      model::output_shapes(model_, state_.step, options_.boundary_shape, options_.boundary_type);
  const auto has_own = [&](std::size_t layer) { return !shapes.empty() && !shapes[layer].empty(); };
  for (auto& [id, layer] : own.layers) {
    const auto found = output.rows.find(id);
    if (found == output.rows.end()) continue;
    layer.rows = mean_rows(found->second);
    layer.sample.boundary_bytes =
        mean_message_bytes({has_own(id.index()) ? shapes[id.index()] : options_.boundary_shape,
                            options_.boundary_type},
                           room_[id.index()], found->second);
  }
  own.figures.plan_s = decisions_.own_plan_s();
  own.figures.migrate_s = move_.last.seconds;
  own.asks = options_.asks && options_.asks() ? 1 : 0;
  if (move_.running && move_.running->transfer.refusal()) {
    own.refuses = move_.running->transfer.refusal()->layer.value + 1;
  }
  DYNMO_ASSIGN(Exchange exchanged,
               exchange(grid_, control(transport::Control::kExchange), state_.plan, model_,
                        options_.accumulation * options_.micro_batches, own));
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    if (!has_own(i) || (!room_.empty() && room_[i] > 0)) continue;
    exchanged.layers[i].boundary_bytes = bytes_of_shape(shapes[i], options_.boundary_type);
  }
  return exchanged;
}

void Pipeline::order_changes() const {
  if (options_.staging.beside) options_.staging.beside->order_changes();
}

Expected<MigrationReport> Pipeline::take_snapshot(std::span<const WorldRank> keepers) {
  DYNMO_TRY(ask_sources_first());
  return runtime::take_snapshot(grid_, control(transport::Control::kSnapshot), model_, keepers,
                                decisions_.controller(), state_, options_.staging);
}

// Sets the room for rows in the next step: those of this step times `row_room`, equal on all ranks.
void Pipeline::make_room(const Exchange& exchanged) {
  if (room_.empty()) return;
  const std::vector<std::int64_t> whole = whole_room(model_, options_.boundary_shape);
  for (std::size_t i = 0; i < room_.size(); ++i) {
    const double wanted = std::ceil(options_.row_room * exchanged.rows[i]);
    if (whole[i] == 0 || !std::isfinite(wanted)) continue;
    room_[i] = static_cast<std::int64_t>(std::clamp(wanted, 1.0, static_cast<double>(whole[i])));
  }
}

// Stops or skips the step if a number is NaN or Inf. Every rank has the same loss and norms.
void Pipeline::check_numbers(StepReport& report, const std::vector<double>& squared_norms) const {
  if (std::isfinite(report.loss) && std::isfinite(report.gradient_norm)) return;
  report.skipped = options_.on_nan == OnNan::kSkip;
  if (report.skipped) return;
  std::string where;
  for (std::size_t i = 0; i < squared_norms.size(); ++i) {
    if (std::isfinite(squared_norms[i])) continue;
    const LayerId layer(static_cast<std::int32_t>(i));
    where = fmt::format(", first in the gradient of layer {} ('{}') on {}", layer,
                        model_[i]->name(), grid_.name_of(state_.plan.owner(layer)));
    break;
  }
  report.stop = make_error(ErrorCode::kBadInput,
                           "step {}: loss is {} and gradient norm {}{}: lower "
                           "optimizer.learning_rate, or pass over such steps with train.on_nan = "
                           "skip",
                           report.step, std::abs(report.loss), report.gradient_norm, where);
}

void Pipeline::update(const StepReport& report) {
  const double factor =
      options_.clip_norm > 0 ? model::clip_factor(report.gradient_norm, options_.clip_norm) : 1.0;
  model::AdamWOptions optimizer = options_.optimizer;
  optimizer.learning_rate = report.learning_rate;
  update_layers(state_.layers, optimizer, factor, report.skipped ? Update::kSkip : Update::kApply,
                options_.staging.device, times_);
}

StepInput Pipeline::round_input(const schedule::Schedule& lowered, const Batches& batches,
                                int round) const {
  const int of_replica = options_.accumulation * options_.micro_batches;
  return {.lowered = lowered,
          .plan = state_.plan,
          .step = state_.step,
          .frozen_layers = state_.frozen_layers,
          .first_micro_batch = grid_.replica() * of_replica + round * options_.micro_batches,
          .step_micro_batches = grid_.replicas() * of_replica,
          .boundary_shape = options_.boundary_shape,
          .output_shapes = model::output_shapes(model_, state_.step, options_.boundary_shape,
                                                options_.boundary_type),
          .room = room_,
          .boundary_type = options_.boundary_type,
          .staging = options_.staging,
          .emulated_speed =
              options_.emulated_speed ? options_.emulated_speed(state_.step, grid_.position()) : 1,
          .device_messages = device_messages_.transport(),
          .batch = [&batches, step = state_.step](MicroBatchId id) { return batches(step, id); }};
}

Expected<StepOutput> Pipeline::run_round(const StepInput& input) {
  return run_schedule(grid_.pipeline(), options_.lane, program_.model, input, state_.layers);
}

Expected<StepOutput> Pipeline::accumulate(const Batches& batches) {
  DYNMO_TRY(ask_sources_first());
  DYNMO_TRY(device_messages_.open(grid_, program_, options_.lane));
  const auto start = Clock::now();
  times_.moving_s = 0;
  const bool on_device = !options_.staging.device.is_cpu();
  const auto mask_gradients = [&] {
    for (auto& [id, layer] : state_.layers) model::mask_gradients(layer);
  };
  const auto queue_norms = [&] {
    return QueuedNorms(options_.ties, state_.layers, options_.staging);
  };
  std::optional<QueuedNorms> norms;
  Reduction reduction(grid_.peers(), state_.layers, options_.staging);
  StepOutput output;
  for (int round = 0; round < options_.accumulation; ++round) {
    StepInput input = round_input(program_.training, batches, round);
    if (round + 1 == options_.accumulation) {
      input.gradient_ready = [&](LayerId layer) { reduction.start(layer); };
      // Norms can be queued now, because nothing is added to the gradients afterwards.
      if (on_device && grid_.replicas() == 1 && options_.ties.empty()) {
        input.before_wait = [&] {
          mask_gradients();
          norms.emplace(queue_norms());
        };
      }
    }
    if (move_.running && !move_.running->agreed) input.before_action = [&] { send_layers(); };
    DYNMO_ASSIGN(StepOutput part, run_round(input));
    append(output, std::move(part), round * options_.micro_batches);
  }
  times_.reducing_s = reduction.seconds();
  times_.schedule_s = seconds_since(start) - times_.reducing_s;
  DYNMO_TRY(reduction.finish());
  times_.reduction_s = reduction.seconds();
  DYNMO_TRY(add_tied_gradients(grid_.pipeline(), options_.ties, state_.plan, state_.layers,
                               options_.staging));
  if (!norms) mask_gradients();
  if (!on_device) return output;
  if (!norms) {
    norms.emplace(queue_norms());
    DeviceClock(options_.staging.device).finish();
  }
  output.squared_norms = norms->read();
  DYNMO_TRY(device_messages_.check());  // before all else uses what has arrived
  read_update_times(times_);
  for (const auto& [id, layer] : state_.layers) {
    if (layer.frozen) times_.update_s[id] = 0;
  }
  return output;
}

// Does what precedes the schedule: asks the sources, moves layers if that pays, predicts the step.
Expected<void> Pipeline::prepare(StepReport& report) {
  report.step = state_.step;
  DYNMO_TRY(ask_sources_first());
  settle_move(report);
  const int frozen = state_.frozen_layers;
  DYNMO_TRY(ask_sources());
  // Precedes the decision, which compares with the current plan and the layers that it recomputes.
  if (state_.frozen_layers != frozen) DYNMO_TRY(rebuild());
  if (options_.balancing == Balancing::kAutomatic && !move_.running) {
    DYNMO_TRY(balance(report, Moves::kDuringStep));
    // Fails if the memory cannot hold the layers that train from now on.
    if (!move_.running && state_.frozen_layers != frozen) {
      DYNMO_TRY(decisions_.recomputed_under(state_.plan, state_.frozen_layers));
    }
  }
  const auto predicting = Clock::now();
  report.predicted_s = decisions_.predicted_step_s(now());
  report.plan_s += seconds_since(predicting);
  report.frozen_layers = state_.frozen_layers;
  report.announced = decisions_.announced();
  return {};
}

Expected<StepReport> Pipeline::step(const Batches& batches) {
  DYNMO_TRY(begin_step(batches));
  DYNMO_ASSIGN(const Exchange exchanged, exchange_figures());
  return finish_step(exchanged);
}

Expected<void> Pipeline::begin_step(const Batches& batches) {
  check_context() = {grid_.rank().value, state_.step};
  // Stops the move's use of the group when begin_step() returns, because the group may end
  // afterwards.
  struct Ends {
    const std::unique_ptr<Moving>& moving;
    ~Ends() {
      if (moving) moving->transfer.give_up();
    }
  };
  const Ends ends{move_.running};
  begun_.emplace();
  begun_->start = Clock::now();
  DYNMO_TRY(prepare(begun_->report));
  begun_->ready = Clock::now();
  DYNMO_ASSIGN(begun_->output, accumulate(batches));
  DYNMO_TRY(finish_moving(begun_->report));
  begun_->complete = true;
  return {};
}

Expected<StepReport> Pipeline::finish_step(const Exchange& given) {
  DYNMO_CHECK(gradients_complete(), "a step that was begun");
  if (!fits(given, model_, grid_.axes())) {
    return make_error(ErrorCode::kInternal, "step {}: the exchange is of another model or group",
                      state_.step);
  }
  const auto met = Clock::now();
  order_changes();
  BegunStep begun = *std::exchange(begun_, std::nullopt);
  StepReport& report = begun.report;
  // All ranks have met, as in apply().
  state_.spares.clear();
  state_.arriving.clear();
  Exchange exchanged = given;
  const dynamism::Outcome outcome{.figures = exchanged.figures,
                                  .squared_norms = exchanged.squared_norms};
  count_work(outcome, exchanged.layers);
  take(exchanged, grid_, state_.plan, report);
  report.learning_rate = config::learning_rate(options_.learning_rate, state_.step);
  check_numbers(report, exchanged.squared_norms);
  if (report.stop) return std::move(report);
  make_room(exchanged);
  if (exchanged.refused > 0) give_up_move(LayerId(static_cast<int>(exchanged.refused) - 1));
  DYNMO_TRY(update_all(report, outcome));

  report.step_s = seconds_since(begun.start);
  report.idle_s = std::max(0.0, report.step_s - report.busy_s);
  // The schedule of the next step waits for a device's update.
  const double waited_s = times_.read_update ? 0 : times_.update_total_s;
  times_.overhead_s =
      seconds_since(begun.ready) - times_.schedule_s - waited_s - report.migrate_end_s;
  // The replay includes the reduction once its bandwidth was measured.
  if (decisions_.knows_reduction()) times_.overhead_s -= times_.reduction_s;
  const auto profiling = Clock::now();
  decisions_.observe(step_of(exchanged), state_.plan, state_.frozen_layers);
  report.profile_s += seconds_since(profiling);
  report.speeds = decisions_.speed_changes();
  report.reduction_s = times_.reduction_s;
  report.update_s = times_.update_total_s;
  report.device_memory_bytes = model::peak_device_memory(options_.staging.device);
  // The time between two exchanges, at which all ranks meet. busy_s is a part of it. The update
  // before the schedule counts, the one after it does not.
  const double between_s =
      times_.after_exchange_s + std::chrono::duration<double>(met - begun.start).count();
  times_.after_exchange_s = seconds_since(met);
  report.bubble = control::bubble(report.busy_by_rank, between_s);
  report.actions = std::move(begun.output.actions);
  report.messages = std::move(begun.output.messages);
  report.start_ns = begun.output.start_ns;
  state_.last_exchange = given;
  ++state_.step;
  state_.asked = false;
  return std::move(report);
}

}  // namespace dynmo::runtime
