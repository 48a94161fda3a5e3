// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/program.h"

#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/recompute.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"

namespace dynmo::runtime {
namespace {

schedule::Schedule lower_checked(const schedule::Schedule& compute) {
  schedule::Schedule lowered = schedule::lower(compute);
  const auto facts = schedule::check(lowered);
  DYNMO_CHECK(facts.has_value(), "a schedule that runs to its end: {}", facts.error().message);
  return lowered;
}

}  // namespace

schedule::Schedule forward_only(const plan::Plan& plan, int micro_batches) {
  const auto shape = plan::shape_of(plan, micro_batches, /*frozen_layers=*/0);
  return lower_checked(schedule::make_forward_schedule(shape).value());
}

Program make_program(const model::Model& model, const RankState& state, int micro_batches,
                     plan::LayerSet recomputed) {
  const int frozen = state.frozen_layers;
  Program program;
  program.training = lower_checked(plan::schedule_of(state.plan, micro_batches, frozen).value());
  program.validation = forward_only(state.plan, micro_batches);
  recompute(program, model, std::move(recomputed));
  return program;
}

void recompute(Program& program, const model::Model& model, plan::LayerSet layers) {
  program.recomputed = std::move(layers);
  program.model = model;
  for (const LayerId id : program.recomputed) {
    program.model[id.index()] = model::recomputed(model[id.index()]);
  }
}

}  // namespace dynmo::runtime
