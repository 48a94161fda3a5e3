// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/generate.h"

#include <algorithm>

#include "dynmo/core/check.h"
#include "dynmo/schedule/generate_impl.h"

namespace dynmo::schedule {
namespace {

// Appends `ahead` forwards, then forwards and backwards alternately, then the remaining backwards.
// GPipe has all forwards ahead.
void append_order(StageOrder order, int micro_batches, int ahead) {
  for (int m = 0; m < ahead; ++m) order.forward(m);
  for (int m = ahead; m < micro_batches; ++m) {
    order.forward(m);
    order.backward(m - ahead);
  }
  for (int m = micro_batches - ahead; m < micro_batches; ++m) order.backward(m);
}

// Appends ZB-H1: 1F1B with I and W apart, each W delayed by `deferred` micro-batches.
void append_split_order(StageOrder order, int micro_batches, int ahead, int deferred) {
  for (int m = 0; m < ahead; ++m) order.forward(m);
  for (int m = 0; m < micro_batches; ++m) {
    if (m < micro_batches - ahead) order.forward(m + ahead);
    order.input_gradient(m);
    if (m >= deferred) order.weight_gradient(m - deferred);
  }
  for (int m = std::max(0, micro_batches - deferred); m < micro_batches; ++m) {
    order.weight_gradient(m);
  }
}

void append_stage(Schedule& schedule, ScheduleKind kind, int stage) {
  const int micro_batches = schedule.shape.micro_batches;
  const int behind = static_cast<int>(schedule.shape.stages.size()) - 1 - stage;
  const int ahead = std::min(micro_batches, behind);
  const StageOrder order(schedule, stage);
  if (kind == ScheduleKind::kZbH1) {
    append_split_order(order, micro_batches, ahead, stage);
  } else {
    append_order(order, micro_batches, kind == ScheduleKind::kGpipe ? micro_batches : ahead);
  }
}

Expected<void> append_one_stage_a_rank(Schedule& schedule, ScheduleKind kind) {
  const std::vector<StageShape>& stages = schedule.shape.stages;
  std::vector<int> holds(schedule.ranks.size(), -1);
  for (std::size_t s = 0; s < stages.size(); ++s) {
    int& other = holds[stages[s].rank.index()];
    if (other >= 0) {
      return make_error(ErrorCode::kBadInput,
                        "stages {} and {} are both on rank {}; {} wants at most one stage a rank",
                        other, s, stages[s].rank, name(kind));
    }
    other = static_cast<int>(s);
    append_stage(schedule, kind, other);
  }
  return {};
}

Expected<void> append_actions(Schedule& schedule, ScheduleKind kind,
                              const ScheduleOptions& options) {
  switch (kind) {
    case ScheduleKind::kGpipe:
    case ScheduleKind::k1F1B:
    case ScheduleKind::kZbH1:
      return append_one_stage_a_rank(schedule, kind);
    case ScheduleKind::kInterleaved:
      return append_interleaved(schedule, options.group_size);
    case ScheduleKind::kZbV:
      return append_zb_v(schedule);
    case ScheduleKind::kAdaptive:
      break;
  }
  return make_error(ErrorCode::kBadInput,
                    "no shape alone gives an {} order; take it from a plan that carries one",
                    name(kind));
}

Schedule empty_schedule(const PipelineShape& shape) {
  return {.shape = shape,
          .ranks = std::vector<std::vector<Action>>(static_cast<std::size_t>(shape.ranks))};
}

}  // namespace

int ranks_in_use(const PipelineShape& shape) {
  std::vector<bool> used(static_cast<std::size_t>(shape.ranks), false);
  for (const StageShape& stage : shape.stages) used[stage.rank.index()] = true;
  return static_cast<int>(std::count(used.begin(), used.end(), true));
}

Expected<Schedule> make_schedule(ScheduleKind kind, const PipelineShape& shape,
                                 const ScheduleOptions& options) {
  DYNMO_TRY(validate(shape));
  Schedule schedule = empty_schedule(shape);
  DYNMO_TRY(append_actions(schedule, kind, options));
  return schedule;
}

Expected<Schedule> make_forward_schedule(PipelineShape shape) {
  DYNMO_TRY(validate(shape));
  for (StageShape& stage : shape.stages) stage.frozen = true;
  Schedule schedule = empty_schedule(shape);
  for (int s = 0; s < static_cast<int>(shape.stages.size()); ++s) {
    StageOrder order(schedule, s);
    for (int m = 0; m < shape.micro_batches; ++m) order.forward(m);
  }
  return schedule;
}

namespace {

std::vector<Rank> placement(int ranks, int stages_per_rank, bool turning) {
  DYNMO_CHECK(ranks >= 1 && stages_per_rank >= 1, "at least 1 rank and stage, got {} and {}", ranks,
              stages_per_rank);
  std::vector<Rank> of_stage;
  for (int lap = 0; lap < stages_per_rank; ++lap) {
    for (int i = 0; i < ranks; ++i) {
      of_stage.emplace_back(turning && lap % 2 == 1 ? ranks - 1 - i : i);
    }
  }
  return of_stage;
}

}  // namespace

std::vector<Rank> loop_placement(int ranks, int stages_per_rank) {
  return placement(ranks, stages_per_rank, /*turning=*/false);
}

std::vector<Rank> wave_placement(int ranks, int stages_per_rank) {
  return placement(ranks, stages_per_rank, /*turning=*/true);
}

}  // namespace dynmo::schedule
