// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/rank_state.h"

#include <ATen/ATen.h>

#include <utility>

#include "dynmo/model/head_slice.h"
#include "dynmo/runtime/ties.h"

namespace dynmo::runtime {

model::StateShape shape_of(const RankState& state, LayerId layer) {
  const auto found = state.pruned.find(layer);
  model::StateShape shape = found == state.pruned.end() ? model::StateShape() : found->second;
  shape.frozen = layer.value < state.frozen_layers;
  return shape;
}

void strip(model::LayerState& layer) {
  for (model::Parameter& parameter : layer.parameters) {
    parameter.gradient.reset();
    parameter.compute_copy.reset();
    parameter.pattern.reset();
  }
}

void roll_back(RankState& state, std::int64_t step) {
  const bool there = state.step == step;
  if (!there) {
    state = {.plan = std::move(state.plan),
             .layers = {},
             .step = step,
             .product_fit = state.product_fit,
             .snapshot = std::exchange(state.snapshot, std::nullopt)};
  }
  state.spares.merge(state.arriving);
  state.arriving.clear();
  if (state.snapshot && state.snapshot->step == step) {
    Snapshot snapshot = *std::exchange(state.snapshot, std::nullopt);
    if (!there) {
      state.layers = std::exchange(snapshot.own, {});
      state.asked = snapshot.asked;
      state.frozen_layers = snapshot.frozen_layers;
      state.source_state = std::move(snapshot.source_state);
      state.controller = std::move(snapshot.controller);
    }
    // Layers may have moved since.
    state.spares.merge(snapshot.own);
    state.spares.merge(snapshot.neighbours);
  }
  std::erase_if(state.spares,
                [&](const auto& spare) { return state.layers.contains(spare.first); });
}

void set_aside(RankState& state, Rank position) {
  for (auto at = state.layers.begin(); at != state.layers.end();) {
    const auto place = at++;
    if (state.plan.owner(place->first) == position) continue;
    auto left = state.layers.extract(place);
    strip(left.mapped());
    state.spares.insert_or_assign(left.key(), std::move(left.mapped()));
  }
}

void keep_as_spares(const LayerStates& copies, RankState& state) {
  for (const auto& [id, copy] : copies) {
    model::LayerState spare = copy;
    strip(spare);
    state.spares.insert_or_assign(id, std::move(spare));
  }
}

void make_whole(const model::Model& model, LayerStates& layers) {
  for (auto& [id, layer] : layers) {
    const bool trains = !layer.frozen && !layer.parameters.empty();
    if (trains && layer.parameters[0].gradient.defined()) continue;
    for (model::Parameter& parameter : layer.parameters) {
      if (trains) parameter.gradient = at::zeros_like(parameter.value);
    }
    model::derive(*model[id.index()], layer);
  }
}

void move_back(const model::Model& model, RankState& state, const plan::Plan& plan, Rank position) {
  state.layers.merge(state.spares);
  state.spares.clear();
  state.plan = plan;
  set_aside(state, position);
  state.spares.clear();
  make_whole(model, state.layers);
}

LayerStates initial_states(const model::Model& model, const plan::Plan& plan, Rank rank,
                           std::uint64_t seed, const std::vector<model::Tie>& ties) {
  LayerStates states;
  const std::vector<model::WholePlace> places = model::whole_places(model);
  for (int i = 0; i < plan.layers(); ++i) {
    const LayerId id(i);
    if (plan.owner(id) != rank) continue;
    // Slices of exits shift the ids of later layers, which must not change their values.
    const model::WholePlace& place = places[id.index()];
    const LayerId drawn_as(place.layer + place.slice);
    model::LayerState state = model::make_state(*model[id.index()], drawn_as, seed);
    state.id = id;
    states.emplace(id, std::move(state));
  }
  take_initial_values(ties, model, seed, states);
  return states;
}

}  // namespace dynmo::runtime
