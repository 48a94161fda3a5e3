// SPDX-License-Identifier: Apache-2.0
// What a pipeline asks its sources of dynamism, and what follows from their answers.
#include <utility>

#include "dynmo/dynamism/source.h"
#include "dynmo/runtime/pipeline.h"

namespace dynmo::runtime {

dynamism::Boundary Pipeline::boundary() {
  return {.step = state_.step,
          .model = model_,
          .states = state_.layers,
          .learning_rate = model::learning_rate(options_.learning_rate, state_.step)};
}

// Once before each step.
Expected<void> Pipeline::ask_sources() {
  if (asked_for_ == state_.step) return {};
  DYNMO_ASSIGN(const dynamism::Change change, dynamism::before_step(state_.sources, boundary()));
  const int frozen = change.frozen_layers.value_or(state_.frozen_layers);
  // The first plan was made for what had changed before this pipeline began.
  auto announced = cost::Announced::kNothing;
  if (asked_for_ >= 0 && frozen != state_.frozen_layers) announced = cost::Announced::kKnown;
  if (asked_for_ >= 0 && change.work) announced = cost::Announced::kWork;
  decisions_.announce(announced, state_.step);
  asked_for_ = state_.step;
  state_.frozen_layers = frozen;
  for (const auto& [id, layer] : state_.layers) {
    if (layer.frozen) times_.update_s[id] = 0;
  }
  return {};
}

// For what runs before the first step.
Expected<void> Pipeline::ask_sources_first() {
  if (asked_for_ >= 0) return {};
  const int frozen = state_.frozen_layers;
  DYNMO_TRY(ask_sources());
  return frozen == state_.frozen_layers ? Expected<void>() : rebuild();
}

Expected<void> Pipeline::rebuild() {
  DYNMO_ASSIGN(plan::LayerSet layers,
               decisions_.recomputed_under(state_.plan, state_.frozen_layers));
  remake_program(std::move(layers));
  return {};
}

}  // namespace dynmo::runtime
