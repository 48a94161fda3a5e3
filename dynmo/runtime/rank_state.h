// SPDX-License-Identifier: Apache-2.0
#pragma once

// The state of a rank between two steps, which outlives its group. It is a value and knows no
// transport. A Pipeline (pipeline.h) binds it to one group and gives it back.

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "dynmo/control/controller.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/product_fit.h"
#include "dynmo/dynamism/training/source.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/model/tie.h"
#include "dynmo/plan/plan.h"
#include "dynmo/runtime/engine.h"
#include "dynmo/runtime/exchange.h"
#include "dynmo/transport/place.h"

namespace dynmo::runtime {

// The state to which a run returns when it has lost a rank. It has copies of layers from before
// `step`, without gradients and compute copies, and the state that was equal on all ranks then.
struct Snapshot {
  std::int64_t step = 0;
  bool asked = false;  // as RankState::asked
  int frozen_layers = 0;
  Json source_state = nullptr;
  std::optional<control::Controller> controller = {};
  LayerStates own = {};  // this rank's layers
  // Layers of another rank, which this one keeps (runtime/snapshot.h).
  LayerStates neighbours = {};
};

struct RankState {
  plan::Plan plan;        // places of all layers
  LayerStates layers;     // layers that the plan gives this rank
  std::int64_t step = 0;  // next step to run
  // Set if the sources were asked before `step`. They may have changed layers since the last step.
  bool asked = false;
  int frozen_layers = 0;  // length of the frozen prefix
  // The shape of each layer that has lost weights to pruning. Equal on all ranks.
  std::map<LayerId, model::StateShape> pruned = {};
  // The measured times of compressed products, equal on all ranks. None before a matrix is
  // compressed.
  std::optional<cost::ProductFit> product_fit = {};
  // The sources of dynamism, with their state. If empty, the pipeline makes those of its options.
  dynamism::Sources sources = {};
  // The state of the sources, for a new rank that has not made its sources yet.
  Json source_state = nullptr;
  // Decides (control/controller.h), with all its measurements. If empty, the pipeline makes it.
  std::optional<control::Controller> controller = {};
  // The state of the controller, for a rank without one.
  Json controller_state = nullptr;
  // Copies of layers, without gradients and compute copies. They left in the last migration, or
  // arrived while it is unknown whether all ranks accept it. Empty once all ranks have met again.
  LayerStates spares = {};
  // The newest snapshot that all ranks have.
  std::optional<Snapshot> snapshot = {};
  // Another rank's layers before `step`, for a snapshot that some ranks may lack. Empty once all
  // ranks have met again.
  LayerStates arriving = {};
  // The exchange of step `step` - 1, kept for a rank that missed it. None if this rank has not run
  // that step.
  std::optional<Exchange> last_exchange = {};
};

// Returns the shape of the layer's state, on any rank.
[[nodiscard]] model::StateShape shape_of(const RankState& state, LayerId layer);

// Frees what a state needs only in a step: gradients, which are zero, and values derived from
// others.
void strip(model::LayerState& layer);
// Moves the layers that the state's plan gives to other positions to its spares.
void set_aside(RankState& state, Rank position);
// Adds verified copies to the spares. They keep all their tensors.
void keep_as_spares(const LayerStates& copies, RankState& state);
// Undoes moves to later plans than `plan`, because the ranks have not agreed on the later plans.
// Afterwards the layers are those that `plan` gives to this position, some of them from the spares.
void move_back(const model::Model& model, RankState& state, const plan::Plan& plan, Rank position);
// Takes the state back to `step`. `layers` and `spares` then have all copies of that step on this
// rank. If the rank was at another step, sources and controller are those of the snapshot. If it
// has no snapshot of that step either, the state becomes that of a new rank.
void roll_back(RankState& state, std::int64_t step);
// Restores what strip() has freed, in layers that were spares.
void make_whole(const model::Model& model, LayerStates& layers);

// Returns the layers that `plan` gives to `rank`, with their initial values.
[[nodiscard]] LayerStates initial_states(const model::Model& model, const plan::Plan& plan,
                                         Rank rank, std::uint64_t seed,
                                         const std::vector<model::Tie>& ties = {});

}  // namespace dynmo::runtime
