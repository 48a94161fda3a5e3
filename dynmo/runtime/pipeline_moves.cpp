// SPDX-License-Identifier: Apache-2.0
// How a pipeline moves to other plans: at once, or while a step runs.
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/transport/gather.h"

namespace dynmo::runtime {

using Clock = std::chrono::steady_clock;

Expected<void> Pipeline::balance(StepReport& report, Moves how) {
  const auto asked = Clock::now();
  DYNMO_ASSIGN(report.decision, decisions_.decide(now()));
  report.plan_s = seconds_since(asked);
  if (!report.decision) return {};
  if (report.decision->migrate) return carry_out(*report.decision, report, how);
  // The plan in force may recompute other layers from now on.
  if (report.decision->recomputed != program_.recomputed) {
    recompute(program_, model_, report.decision->recomputed);
  }
  return {};
}

Expected<void> Pipeline::carry_out(control::Decision& decision, StepReport& report, Moves how) {
  const plan::Plan& wanted = decision.plan;
  if (const auto layers = decisions_.recomputed_under(wanted, state_.frozen_layers); !layers) {
    decisions_.not_moved();
    decision.migrate = false;
    decision.reason =
        fmt::format("keep {}: {}", plan::to_string(state_.plan), layers.error().message);
    return {};
  }
  const auto start = Clock::now();
  const plan::Migration migration = plan::difference(state_.plan, wanted, *costs());
  if (how == Moves::kDuringStep) {
    DYNMO_TRY(begin_move(wanted));
  } else {
    DYNMO_TRY(apply(wanted));
  }
  const double seconds = seconds_since(start);
  report.migrate_s += seconds;
  if (move_.running) return {};  // reported when it comes into force
  if (state_.plan != wanted) {
    decisions_.not_moved();
    return {};
  }
  report.moved_layers += static_cast<int>(migration.moves.size());
  report.moved_bytes += migration.bytes();
  report.move_pause_s += seconds;
  return {};
}

Expected<StepReport> Pipeline::rebalance() {
  DYNMO_TRY(ask_sources_first());
  StepReport report;
  report.step = state_.step;
  settle_move(report);
  DYNMO_TRY(balance(report, Moves::kNow));
  return report;
}

Expected<StepReport> Pipeline::vacate(const std::vector<Rank>& kept) {
  StepReport report;
  StepReport settled;
  report.step = state_.step;
  settle_move(settled);
  DYNMO_ASSIGN(report.decision, decisions_.vacate(now(), kept));
  DYNMO_TRY(carry_out(*report.decision, report, Moves::kNow));
  return report;
}

// Checks that every rank derived the same plan. A difference is a bug, found before anything moves.
Expected<Pipeline::Wanted> Pipeline::agree_on(const plan::Plan& plan, Moves how) {
  const int frozen = state_.frozen_layers;
  DYNMO_TRY(plan::validate(plan, static_cast<int>(model_.size())));
  DYNMO_TRY(plan::schedule_of(plan, options_.micro_batches, frozen));
  Wanted wanted{.migration = plan::difference(state_.plan, plan, profiler().known(frozen)),
                .recomputed = {}};
  DYNMO_ASSIGN(wanted.recomputed, decisions_.recomputed_under(plan, frozen));
  DYNMO_TRY(transport::agree(
      grid_.world(), control(transport::Control::kPlan), "plan",
      fmt::format("{} recompute {}{}", plan::digest(plan).hex(), fmt::join(wanted.recomputed, " "),
                  how == Moves::kDuringStep ? " during a step" : "")));
  state_.spares.clear();  // all ranks have met: all had committed the last move
  return wanted;
}

// Settles the last move, so that the caller can begin the next one.
Expected<void> Pipeline::end_last_move() {
  DYNMO_TRY(ask_sources_first());
  StepReport report;
  settle_move(report);
  DYNMO_CHECK(move_.running == nullptr, "one move at a time");
  return {};
}

Expected<bool> Pipeline::apply(const plan::Plan& plan) {
  DYNMO_TRY(end_last_move());
  DYNMO_ASSIGN(Wanted wanted, agree_on(plan, Moves::kNow));
  return move_now(plan, std::move(wanted));
}

Expected<bool> Pipeline::move_now(const plan::Plan& plan, Wanted wanted) {
  DYNMO_ASSIGN(move_.last, migrate(grid_.world(), control(transport::Control::kVote), model_,
                                   transfers(wanted.migration, grid_.axes(), state_), state_,
                                   options_.staging));
  if (!move_.last.committed) return false;
  state_.plan = plan;
  set_aside(state_, grid_.position());
  decisions_.moved(wanted.migration.bytes());
  remake_program(std::move(wanted.recomputed));
  return true;
}

Expected<bool> Pipeline::begin_move(const plan::Plan& plan) {
  DYNMO_TRY(end_last_move());
  // The sources may change layers, so ask them before these are sent.
  const int frozen = state_.frozen_layers;
  DYNMO_TRY(ask_sources());
  if (state_.frozen_layers != frozen) DYNMO_TRY(rebuild());
  const auto start = Clock::now();
  DYNMO_ASSIGN(Wanted wanted, agree_on(plan, Moves::kDuringStep));
  if (wanted.migration.moves.empty() || !holds_twice(wanted.migration)) {
    return move_now(plan, std::move(wanted));
  }
  const std::vector<schedule::Action>& actions = program_.training.ranks[grid_.position().index()];
  const auto computing = static_cast<std::size_t>(std::ranges::count_if(
      actions, [](const schedule::Action& action) { return schedule::is_compute(action.kind); }));
  move_.running.reset(new Moving{
      .plan = plan,
      .recomputed = std::move(wanted.recomputed),
      .layers = static_cast<int>(wanted.migration.moves.size()),
      .bytes = wanted.migration.bytes(),
      .transfer = {grid_.world(), model_, transfers(wanted.migration, grid_.axes(), state_),
                   state_.layers, computing * static_cast<std::size_t>(options_.accumulation),
                   options_.staging}});
  move_.running->report.seconds = seconds_since(start);
  return true;
}

// Returns whether every rank has memory for the arriving layers in addition to its own, as far as
// that is known.
bool Pipeline::holds_twice(const plan::Migration& migration) const {
  auto costs = decisions_.costs(state_.frozen_layers);
  if (!costs) return true;
  costs = plan::recomputed(*std::move(costs), program_.recomputed);
  return plan::holds_both(state_.plan, migration,
                          {*costs, decisions_.cluster(), options_.micro_batches});
}

void Pipeline::send_layers() {
  const auto start = Clock::now();
  move_.running->transfer.send_some();
  times_.moving_s += seconds_since(start);
}

// Sends the gradients of the layers that move, and waits for the copies. The step's gradients are
// complete.
Expected<void> Pipeline::finish_moving(StepReport& report) {
  if (!move_.running) return {};
  DYNMO_ASSIGN(report.migrate_end_s, move_.running->transfer.finish(state_.layers));
  report.migrate_s += report.migrate_end_s;
  move_.running->report.seconds += report.migrate_end_s;
  return {};
}

// Ends the move after a refusal. All ranks stay with the current plan.
void Pipeline::give_up_move(LayerId refused) {
  DYNMO_CHECK(move_.running != nullptr, "a move whose copy of layer {} is refused", refused);
  move_.last = move_.running->report;
  const auto& own = move_.running->transfer.refusal();
  move_.last.refusal = own && own->layer == refused
                           ? own->why
                           : fmt::format("layer {}: another rank has refused its copy", refused);
  decisions_.not_moved();
  move_.running.reset();
}

// Updates the layers of this rank, and at both ends of a move those that move. The sources of both
// ends get the step's outcome, so that both have the same state.
Expected<void> Pipeline::update_all(const StepReport& report, const dynamism::Outcome& outcome) {
  std::vector<LayerId> arrived;
  if (move_.running) {
    for (const auto& [id, layer] : move_.running->transfer.arrived()) arrived.push_back(id);
    state_.layers.merge(move_.running->transfer.arrived());
  }
  update(report);
  auto told = dynamism::after_update(state_.sources, boundary(), outcome);
  for (const LayerId id : arrived) {
    move_.running->transfer.arrived().insert(state_.layers.extract(id));
  }
  if (!told || !move_.running) return told;
  move_.running->agreed = true;
  keep_as_spares(move_.running->transfer.arrived(), state_);
  return {};
}

// Applies the plan to which layers moved during the last step. Sends nothing, because all ranks
// know that it applies.
void Pipeline::settle_move(StepReport& report) {
  if (!move_.running || !move_.running->agreed) return;
  const auto start = Clock::now();
  Moving& moving = *move_.running;
  state_.plan = std::move(moving.plan);
  for (const auto& [id, layer] : moving.transfer.arrived()) state_.spares.erase(id);
  state_.layers.merge(moving.transfer.arrived());
  set_aside(state_, grid_.position());
  decisions_.moved(moving.bytes);
  remake_program(std::move(moving.recomputed));
  const double seconds = seconds_since(start);
  move_.last = moving.report;
  move_.last.committed = true;
  move_.last.seconds += seconds;
  move_.last.sent = moving.transfer.sent();
  move_.last.received = moving.transfer.received();
  report.migrate_s += seconds;
  report.moved_layers += moving.layers;
  report.moved_bytes += moving.bytes;
  report.move_pause_s += move_.last.seconds;
  move_.running.reset();
}

}  // namespace dynmo::runtime
