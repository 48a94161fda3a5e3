// SPDX-License-Identifier: Apache-2.0
#pragma once

// Begins a new group with ranks that bring layers from an earlier one, of the same or another size.
// All ranks say what they hold. Every rank derives the transfers from that, and the layers move as
// in a migration. Past plans do not matter, only what is there.
//
// After a loss the ranks bring copies of several steps. They begin at the newest step of which all
// copies are there (elastic/recovery.h).

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
  // Ascending by layer and kind. Empty for a new rank.
  std::vector<Layer> layers = {};
  friend bool operator==(const Holdings&, const Holdings&) = default;
};
[[nodiscard]] Holdings holdings_of(const RankState& state);  // includes spares and snapshots
[[nodiscard]] Json to_json(const Holdings& holdings);
[[nodiscard]] Expected<Holdings> parse_holdings(const Json& json);

// Returns the step of the live layers. Returns kNoCheckpoint if there are none, and kInternal if
// their steps differ.
[[nodiscard]] Expected<std::int64_t> step_of(const std::vector<Holdings>& by_rank);
// Returns the transfers that bring every layer of `step` to its place under `plan` in each replica.
// Only live copies of `step` count. After a loss, roll_back() first makes the copies in snapshots
// live.
//
// A rank that holds a layer keeps its own. A missing layer comes from a holder in the same replica.
// Otherwise it comes from the holder that has the fewest layers to send, the lowest among equals.
// Transfers are sorted by layer, then receiver.
//
// Requires a plan of axes.positions ranks. Returns kNoCheckpoint if no rank holds a layer.
[[nodiscard]] Expected<std::vector<LayerTransfer>> choose_sources(
    const std::vector<Holdings>& by_rank, std::int64_t step, const plan::Plan& plan,
    const transport::Axes& axes);

// Forms the new group's states. All its ranks call it with an equal `plan`, whose generation is
// new, and each with its own state. A new rank brings RankState(), and receives the state of the
// other ranks' sources and controller. Afterwards `mine` is what the plan gives this rank. After an
// error it still has all that it brought. Fails with kPeerLost, with kNoCheckpoint if no rank holds
// a layer, and with kInternal if a rank refused a copy.
[[nodiscard]] Expected<void> regroup(const transport::Grid& grid, const model::Model& model,
                                     const plan::Plan& plan, RankState& mine,
                                     const Staging& staging = {});
// Like regroup(), after a loss, with an equal `step`. Each rank first rolls back to it. All take
// sources and controller from one rank, because some ranks may have begun a later step.
[[nodiscard]] Expected<void> regroup_at(std::int64_t step, const transport::Grid& grid,
                                        const model::Model& model, const plan::Plan& plan,
                                        RankState& mine, const Staging& staging = {});

}  // namespace dynmo::runtime
