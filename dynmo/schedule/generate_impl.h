// SPDX-License-Identifier: Apache-2.0
#pragma once

// Helpers of the generators.

#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule {

// Appends actions of one stage to the list of its rank. A frozen stage runs its F and leaves the
// rest out. So every template takes a frozen prefix, and no action waits for its backwards.
class StageOrder {
 public:
  StageOrder(Schedule& schedule, int stage)
      : list_(schedule.ranks[schedule.shape.stages[static_cast<std::size_t>(stage)].rank.index()]),
        stage_(stage),
        frozen_(schedule.shape.stages[static_cast<std::size_t>(stage)].frozen) {}

  void forward(int micro_batch) { add(ActionKind::kForward, micro_batch); }
  void backward(int micro_batch) { add_gradient(ActionKind::kBackward, micro_batch); }
  void input_gradient(int micro_batch) { add_gradient(ActionKind::kInputGradient, micro_batch); }
  void weight_gradient(int micro_batch) { add_gradient(ActionKind::kWeightGradient, micro_batch); }

 private:
  void add(ActionKind kind, int micro_batch) {
    list_.push_back({.kind = kind, .stage = stage_, .micro_batch = MicroBatchId{micro_batch}});
  }
  void add_gradient(ActionKind kind, int micro_batch) {
    if (!frozen_) add(kind, micro_batch);
  }
  std::vector<Action>& list_;
  StageId stage_;
  bool frozen_;
};

// Returns the number of ranks that hold a stage.
[[nodiscard]] int ranks_in_use(const PipelineShape& shape);

// Appends the actions of interleaved 1F1B to `schedule`. Requires a valid shape and empty lists.
// Returns kBadInput if the stages are not in the order that it needs, or the group size does not
// fit.
Expected<void> append_interleaved(Schedule& schedule, int group_size);
Expected<void> append_zb_v(Schedule& schedule);

}  // namespace dynmo::schedule
