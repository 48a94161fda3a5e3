// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/traffic_intervals.h"

#include <algorithm>
#include <utility>

#include "dynmo/plan/migration.h"
#include "dynmo/plan/traffic.h"
#include "dynmo/transport/tags.h"
#include "dynmo/transport/traffic.h"

namespace dynmo::train {
namespace {

void add(TrafficRows& sum, const TrafficRows& rows, std::int64_t times) {
  for (TrafficRow row : rows) {
    row.count.messages *= times;
    row.count.bytes = row.count.bytes * times;
    sum.push_back(row);
  }
  sum = sums_of(std::move(sum));
}

}  // namespace

void TrafficIntervals::begin(const GroupRun& run) {
  plan_ = run.pipeline().plan();
  first_step_ = run.pipeline().next_step();
  steps_ = times_ = 0;
  frozen_layers_ = -1;
  coming_.reset();
  predicted_.clear();
  predict_step(run, run.pipeline().frozen_layers());
  begun_ = newest_ = run.transport().row();
}

TrafficIntervals::Ended TrafficIntervals::before_step(transport::Transport& group,
                                                      const GroupRun& run) {
  newest_ = run.transport().row();
  if (run.pipeline().plan().generation == plan_.generation)
    return std::optional<observe::TrafficInterval>();
  return end(group, run);
}

TrafficIntervals::Ended TrafficIntervals::after_step(transport::Transport& group,
                                                     const GroupRun& run,
                                                     const runtime::StepReport& report) {
  std::optional<observe::TrafficInterval> ended;
  if (report.moved_layers > 0) {
    DYNMO_ASSIGN(ended, close(group, run, newest_));
    add_move(run);
    first_step_ = report.step;
  }
  const bool changed = report.announced != cost::Announced::kNothing;
  if (changed || frozen_layers_ != report.frozen_layers) {
    add_steps();
    frozen_layers_ = report.frozen_layers;
    predict_step(run, frozen_layers_);
  }
  ++times_;
  ++steps_;
  if (const plan::Plan* coming = run.pipeline().coming_plan()) {
    const cost::ModelCost known = run.pipeline().profiler().known(frozen_layers_);
    const auto replicas = static_cast<int>(config_.pipeline.replicas);
    const plan::Migration moved = plan::difference(plan_, *coming, known);
    add(predicted_, plan::traffic_of(moved, plan_.ranks, replicas), 1);
    add(predicted_, plan::traffic_of_gradients(moved, known, plan_.ranks, replicas), 1);
    coming_ = *coming;
  }
  return ended;
}

void TrafficIntervals::copied(const GroupRun& run, std::span<const WorldRank> keepers) {
  const int frozen = run.pipeline().frozen_layers();
  add(predicted_,
      plan::traffic_of_copies(run.pipeline().plan(), run.pipeline().profiler().known(frozen),
                              keepers),
      1);
}

void TrafficIntervals::validated() {
  TrafficRows forward = step_;
  std::erase_if(forward, [](const TrafficRow& row) { return row.purpose != Purpose::kActivation; });
  add(predicted_, forward, config_.train.validation_steps);
}

TrafficIntervals::Ended TrafficIntervals::end(transport::Transport& group, const GroupRun& run) {
  if (run.pipeline().plan().generation != plan_.generation) add_move(run);
  DYNMO_ASSIGN(auto ended, close(group, run, run.transport().row()));
  first_step_ = run.pipeline().next_step();
  return ended;
}

TrafficIntervals::Ended TrafficIntervals::close(transport::Transport& group, const GroupRun& run,
                                                const Counts& until) {
  add_steps();
  Counts mine = until;
  for (std::size_t i = 0; i < mine.size(); ++i) {
    mine[i].messages -= begun_[i].messages;
    mine[i].bytes -= begun_[i].bytes;
  }
  observe::TrafficInterval interval{.generation = plan_.generation,
                                    .first_step = first_step_,
                                    .steps = std::exchange(steps_, 0),
                                    .ranks = {},
                                    .nodes = {},
                                    .measured = {},
                                    .predicted = std::exchange(predicted_, {})};
  DYNMO_ASSIGN(
      interval.measured,
      transport::gather_rows(group, transport::control_tag(transport::Control::kTraffic), mine));
  begun_ = until;
  const int positions = run.pipeline().grid().positions();
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto position = static_cast<std::size_t>(rank % positions);
    interval.ranks.push_back(rank);
    interval.nodes.push_back(rank / positions * positions + run.cluster().ranks[position].node);
  }
  if (interval.steps == 0) return std::optional<observe::TrafficInterval>();
  return std::optional(std::move(interval));
}

void TrafficIntervals::predict_step(const GroupRun& run, int frozen_layers) {
  step_ =
      plan::traffic_of(plan_, run.pipeline().profiler().known(frozen_layers),
                       static_cast<int>(config_.batch.micro_batches * config_.batch.accumulation),
                       static_cast<int>(config_.pipeline.replicas));
}

void TrafficIntervals::add_steps() { add(predicted_, step_, std::exchange(times_, 0)); }

// Adds the move from the interval's plan to the current one.
void TrafficIntervals::add_move(const GroupRun& run) {
  add_steps();
  const plan::Plan& now = run.pipeline().plan();
  const int frozen = std::max(frozen_layers_, 0);
  const plan::Plan before = std::exchange(coming_, std::nullopt).value_or(plan_);
  add(predicted_,
      plan::traffic_of(plan::difference(before, now, run.pipeline().profiler().known(frozen)),
                       now.ranks, static_cast<int>(config_.pipeline.replicas)),
      1);
  plan_ = now;
  frozen_layers_ = -1;
}

}  // namespace dynmo::train
