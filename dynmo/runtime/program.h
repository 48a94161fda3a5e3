// SPDX-License-Identifier: Apache-2.0
#pragma once

// The engine runs this program under one plan: it follows from the plan, the frozen prefix and the
// layers to recompute, alike on all ranks, and is made again when one of them changes.

#include "dynmo/model/layer.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/runtime/rank_state.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::runtime {

struct Program {
  schedule::Schedule training;    // lowered
  schedule::Schedule validation;  // lowered, forward only
  plan::LayerSet recomputed;      // layers that keep their input only
  model::Model model;             // those of `recomputed` wrapped
};

// Lowered and checked: the layers of the plan forward, as in validation.
[[nodiscard]] schedule::Schedule forward_only(const plan::Plan& plan, int micro_batches);
// Requires a plan that runs `micro_batches`.
[[nodiscard]] Program make_program(const model::Model& model, const RankState& state,
                                   int micro_batches, plan::LayerSet recomputed);
// The same program with other layers recomputed.
void recompute(Program& program, const model::Model& model, plan::LayerSet layers);

}  // namespace dynmo::runtime
