// SPDX-License-Identifier: Apache-2.0
#pragma once

// How ranks that bring layers from an earlier group begin a new one, of the same or another number
// of ranks: all say what they hold, every rank derives who sends what to whom, and the layers move
// as in a migration. Plans of the past count for nothing, only what is there. After a loss they
// bring copies of several steps, and begin at the newest one of which there are all
// (elastic/recovery.h).

#include <cstdint>
#include <optional>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/product_fit.h"
#include "dynmo/elastic/recovery.h"
#include "dynmo/model/layer.h"
#include "dynmo/plan/plan.h"
#include "dynmo/runtime/migrate.h"
#include "dynmo/runtime/rank_state.h"
#include "dynmo/runtime/staging.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// The layers and decisions that one rank brings.
struct Holdings {
  struct Layer {
    elastic::Holding copy;
    model::StateShape shape = {};
    friend bool operator==(const Layer&, const Layer&) = default;
  };
  int frozen_layers = 0;  // of the live layers
  Generation generation = 0;
  bool asked = false;  // RankState::asked
  std::optional<cost::ProductFit> product_fit = {};
  std::vector<Layer> layers = {};  // ascending by layer and kind; none: a rank that comes new
  friend bool operator==(const Holdings&, const Holdings&) = default;
};
[[nodiscard]] Holdings holdings_of(const RankState& state);  // spares and snapshots included
[[nodiscard]] Json to_json(const Holdings& holdings);
[[nodiscard]] Expected<Holdings> parse_holdings(const Json& json);

// The step of the live layers. kNoCheckpoint where there are none, kInternal where they are of
// several steps.
[[nodiscard]] Expected<std::int64_t> step_of(const std::vector<Holdings>& by_rank);
// The transfers that bring every layer, as it was before `step`, to where `plan` wants it in each
// replica; copies of other steps and in snapshots are ignored (roll_back makes those live). A rank
// that holds a layer keeps its own; a missing one comes from a holder in its replica, else from the
// holder that has the fewest to send, of equals the lowest. Sorted by layer, then receiver.
// Requires a plan of axes.positions ranks. kNoCheckpoint where nobody holds a layer.
[[nodiscard]] Expected<std::vector<LayerTransfer>> choose_sources(
    const std::vector<Holdings>& by_rank, std::int64_t step, const plan::Plan& plan,
    const transport::Axes& axes);

// Called by all ranks of a new group with equal `plan`, whose generation no group has had, and each
// with what it brings (of a rank that comes new: RankState()). Afterwards `mine` is what the plan
// gives this rank, with what sources and controller of the others remember. After an error it still
// has all it came with.
[[nodiscard]] Expected<void> regroup(const transport::Grid& grid, const model::Model& model,
                                     const plan::Plan& plan, RankState& mine,
                                     const Staging& staging = {});
// The same after a loss, with an equal `step`: each rank rolls back to it first. As some have been
// in a step that others have not begun, all take sources and controller from one of them.
[[nodiscard]] Expected<void> regroup_at(std::int64_t step, const transport::Grid& grid,
                                        const model::Model& model, const plan::Plan& plan,
                                        RankState& mine, const Staging& staging = {});

}  // namespace dynmo::runtime
