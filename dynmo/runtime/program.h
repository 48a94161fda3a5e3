// SPDX-License-Identifier: Apache-2.0
#pragma once

// The program of the engine under one plan. It follows from the plan, the frozen prefix and the
// layers to recompute, alike on all ranks. It is made again when one of them changes.

#include "dynmo/model/layer.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/runtime/rank_state.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::runtime {

struct Program {
  schedule::Schedule training;    // lowered
  schedule::Schedule validation;  // lowered, forward only
  plan::LayerSet recomputed;      // layers that keep their input only
  // The model, with the layers of `recomputed` wrapped.
  model::Model model;
};

// Returns a lowered and checked schedule that runs the layers of the plan forward, as in
// validation.
[[nodiscard]] schedule::Schedule forward_only(const plan::Plan& plan, int micro_batches);
// Makes the program. Requires a plan that runs `micro_batches`.
[[nodiscard]] Program make_program(const model::Model& model, const RankState& state,
                                   int micro_batches, plan::LayerSet recomputed);
// Changes the layers that the program recomputes.
void recompute(Program& program, const model::Model& model, plan::LayerSet layers);

}  // namespace dynmo::runtime
