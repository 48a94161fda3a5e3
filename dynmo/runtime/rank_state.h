// SPDX-License-Identifier: Apache-2.0
#pragma once

// A rank holds this state between two steps and takes it along when its group ends: a value that
// knows no transport. A Pipeline (pipeline.h) binds it to one group and gives it back.

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

// A run goes back to a snapshot when it has lost a rank: copies of layers as they were before
// `step` ran, and what all ranks knew alike then. The layers are without gradients and compute
// copies.
struct Snapshot {
  std::int64_t step = 0;
  bool asked = false;  // as RankState has it
  int frozen_layers = 0;
  Json source_state = nullptr;
  std::optional<control::Controller> controller = {};
  LayerStates own = {};         // this rank's layers
  LayerStates neighbours = {};  // another rank's, which this one keeps (runtime/snapshot.h)
};

struct RankState {
  plan::Plan plan;        // that the layers lie under
  LayerStates layers;     // that the plan gives this rank of its replica
  std::int64_t step = 0;  // the next one to run
  // The sources were asked before `step`: layers may be changed for it, and are no longer those
  // that the last step has left.
  bool asked = false;
  int frozen_layers = 0;  // length of the frozen prefix
  // The shape of each layer that has lost weights to pruning; equal on all ranks.
  std::map<LayerId, model::StateShape> pruned = {};
  // Times of their products as measured; equal on all ranks. None before a matrix is compressed.
  std::optional<cost::ProductFit> product_fit = {};
  // The sources of dynamism, with their state; none: the pipeline makes those of its options.
  dynamism::Sources sources = {};
  // The state of the sources, where those of this rank are still to be made: it came new.
  Json source_state = nullptr;
  // Decides (control/controller.h), with all it has measured; none: the pipeline makes it.
  std::optional<control::Controller> controller = {};
  // The state to make it from, where this rank has none yet.
  Json controller_state = nullptr;
  // Copies of layers that the last migration took away, or brought while it is not known whether
  // all ranks take it: without gradients and compute copies. Empty once all ranks have met again.
  LayerStates spares = {};
  // The newest that all ranks have.
  std::optional<Snapshot> snapshot = {};
  // Another rank's layers before `step`, for a snapshot that perhaps not all ranks have. Empty once
  // all ranks have met again.
  LayerStates arriving = {};
  // That of step `step` - 1, for a rank that lacks only this; none where this rank has not run it.
  std::optional<Exchange> last_exchange = {};
};

// Returns the shape of the layer's state, whichever rank has it.
[[nodiscard]] model::StateShape shape_of(const RankState& state, LayerId layer);

// Frees what a state that no step uses can do without: gradients, which are zero, and what is
// derived from the values.
void strip(model::LayerState& layer);
// Makes spares of the layers that the state's plan gives to others.
void set_aside(RankState& state, Rank position);
// Makes spares of verified copies, which keep all they have.
void keep_as_spares(const LayerStates& copies, RankState& state);
// Undoes what was moved under other plans since `plan` was in force, which nobody has agreed on:
// the state has all layers that `plan` gives to this position, some of them as spares.
void move_back(const model::Model& model, RankState& state, const plan::Plan& plan, Rank position);
// Takes the state back to `step`: `layers` and `spares` are all copies of that step which this rank
// has anywhere, sources and controller those of the snapshot where the rank was at another step.
// Without a copy of that step it is like a rank that comes new.
void roll_back(RankState& state, std::int64_t step);
// Layers that were spares get back what they were kept without.
void make_whole(const model::Model& model, LayerStates& layers);

// Layers that `plan` gives to `rank`, with their initial values.
[[nodiscard]] LayerStates initial_states(const model::Model& model, const plan::Plan& plan,
                                         Rank rank, std::uint64_t seed,
                                         const std::vector<model::Tie>& ties = {});

}  // namespace dynmo::runtime
