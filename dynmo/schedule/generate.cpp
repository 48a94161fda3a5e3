// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/generate.h"

#include <algorithm>

namespace dynmo::schedule {
namespace {

// The list of one stage, written in order.
class StageOrder {
 public:
  StageOrder(std::vector<Action>& list, std::size_t stage)
      : list_(list), stage_(static_cast<std::int32_t>(stage)) {}

  void forward(int micro_batch) { add(ActionKind::kForward, micro_batch); }
  void backward(int micro_batch) { add(ActionKind::kBackward, micro_batch); }

 private:
  void add(ActionKind kind, int micro_batch) {
    list_.push_back({.kind = kind, .stage = stage_, .micro_batch = MicroBatchId{micro_batch}});
  }
  std::vector<Action>& list_;
  StageId stage_;
};

// `ahead` forwards, then one forward and one backward in turn, then the backwards that are left.
// GPipe is the case of all forwards ahead.
void append_order(StageOrder order, int micro_batches, int ahead) {
  for (int m = 0; m < ahead; ++m) order.forward(m);
  for (int m = ahead; m < micro_batches; ++m) {
    order.forward(m);
    order.backward(m - ahead);
  }
  for (int m = micro_batches - ahead; m < micro_batches; ++m) order.backward(m);
}

void append_forwards(StageOrder order, int micro_batches) {
  for (int m = 0; m < micro_batches; ++m) order.forward(m);
}

int forwards_ahead(ScheduleKind kind, const PipelineShape& shape, std::size_t stage) {
  if (kind == ScheduleKind::kGpipe) return shape.micro_batches;
  return std::min(shape.micro_batches, static_cast<int>(shape.stages.size() - 1 - stage));
}

Expected<void> one_stage_a_rank(ScheduleKind kind, const PipelineShape& shape) {
  std::vector<int> holds(static_cast<std::size_t>(shape.ranks), -1);
  for (std::size_t s = 0; s < shape.stages.size(); ++s) {
    int& other = holds[shape.stages[s].rank.index()];
    if (other >= 0) {
      return make_error(ErrorCode::kBadInput,
                        "stages {} and {} are both on rank {}; {} wants at most one stage a rank",
                        other, s, shape.stages[s].rank, name(kind));
    }
    other = static_cast<int>(s);
  }
  return {};
}

Schedule empty_schedule(const PipelineShape& shape) {
  return {.shape = shape,
          .ranks = std::vector<std::vector<Action>>(static_cast<std::size_t>(shape.ranks))};
}

}  // namespace

Expected<Schedule> make_schedule(ScheduleKind kind, const PipelineShape& shape) {
  DYNMO_TRY(validate(shape));
  if (kind != ScheduleKind::kGpipe && kind != ScheduleKind::k1F1B) {
    return make_error(ErrorCode::kBadInput, "no generator makes {} from a shape", name(kind));
  }
  DYNMO_TRY(one_stage_a_rank(kind, shape));
  Schedule schedule = empty_schedule(shape);
  for (std::size_t s = 0; s < shape.stages.size(); ++s) {
    const StageOrder order(schedule.ranks[shape.stages[s].rank.index()], s);
    if (shape.stages[s].frozen) {
      append_forwards(order, shape.micro_batches);
    } else {
      append_order(order, shape.micro_batches, forwards_ahead(kind, shape, s));
    }
  }
  return schedule;
}

Expected<Schedule> make_forward_schedule(PipelineShape shape) {
  DYNMO_TRY(validate(shape));
  for (StageShape& stage : shape.stages) stage.frozen = true;
  Schedule schedule = empty_schedule(shape);
  for (std::size_t s = 0; s < shape.stages.size(); ++s) {
    append_forwards(StageOrder(schedule.ranks[shape.stages[s].rank.index()], s),
                    shape.micro_batches);
  }
  return schedule;
}

}  // namespace dynmo::schedule
