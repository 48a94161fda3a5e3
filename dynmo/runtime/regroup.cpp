// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/regroup.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/json.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::runtime {
namespace {

using Holders = std::map<WorldRank, model::StateShape>;

std::vector<Holders> holders_of(const std::vector<Holdings>& by_rank, int layers) {
  std::vector<Holders> all(static_cast<std::size_t>(layers));
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const Holdings::Layer& held : by_rank[rank].layers) {
      all[held.layer.index()].emplace(WorldRank(static_cast<int>(rank)), held.shape);
    }
  }
  return all;
}

// The first rank that brings anything; all that do agree with it on the step.
Expected<Holdings> newest(const std::vector<Holdings>& by_rank) {
  std::optional<Holdings> found;
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    const Holdings& theirs = by_rank[rank];
    if (theirs.layers.empty()) continue;
    if (!found) found = theirs;
    if (theirs.step != found->step) {
      return make_error(ErrorCode::kInternal, "rank {} brings layers of step {}, others of step {}",
                        rank, theirs.step, found->step);
    }
    found->generation = std::max(found->generation, theirs.generation);
  }
  if (!found) return make_error(ErrorCode::kNoCheckpoint, "no rank of the new group has layers");
  return *found;
}

Expected<std::vector<Holdings>> gather_holdings(transport::Transport& group,
                                                const RankState& mine) {
  DYNMO_ASSIGN(const auto values,
               transport::gather_json(group, transport::control_tag(transport::Control::kHoldings),
                                      to_json(holdings_of(mine)), "what a rank holds"));
  std::vector<Holdings> all;
  for (const Json& json : values) {
    DYNMO_ASSIGN(Holdings theirs, parse_holdings(json));
    all.push_back(std::move(theirs));
  }
  return all;
}

// A new rank learns what the sources of dynamism remember.
Expected<void> share_sources(transport::Transport& group, RankState& mine) {
  const Json own = mine.layers.empty() ? Json() : dynamism::state(mine.sources);
  DYNMO_ASSIGN(Json theirs,
               transport::first_json(group, transport::control_tag(transport::Control::kHoldings),
                                     own, "sources of another rank"));
  if (mine.sources.empty() && !theirs.is_null()) mine.source_state = std::move(theirs);
  return {};
}

// ... and what the controller has measured and is about to do. It is long, so it is sent only where
// a rank may need it, by the first that holds layers.
Expected<void> share_controller(transport::Transport& group, RankState& mine,
                                const std::vector<Holdings>& all) {
  const auto is_empty = [](const Holdings& theirs) { return theirs.layers.empty(); };
  if (std::ranges::none_of(all, is_empty)) return {};
  const auto first = std::ranges::find_if_not(all, is_empty);
  const bool sends = std::distance(all.begin(), first) == group.rank().value && mine.controller;
  DYNMO_ASSIGN(Json theirs,
               transport::first_json(group, transport::control_tag(transport::Control::kCosts),
                                     sends ? mine.controller->state() : Json(),
                                     "controller of another rank"));
  if (!mine.controller) mine.controller_state = std::move(theirs);
  return {};
}

}  // namespace

Holdings holdings_of(const RankState& state) {
  std::map<LayerId, model::StateShape> layers;
  for (const LayerStates* some : {&state.layers, &state.spares}) {
    for (const auto& [id, layer] : *some) {
      layers.emplace(id, model::shape_of(layer));
    }
  }
  Holdings holdings{.step = state.step,
                    .frozen_layers = state.frozen_layers,
                    .generation = state.plan.generation};
  for (const auto& [id, shape] : layers) holdings.layers.push_back({id, shape});
  return holdings;
}

Json to_json(const Holdings& holdings) {
  Json layers = Json::array();
  for (const Holdings::Layer& held : holdings.layers) {
    layers.push_back({{"layer", held.layer.value}, {"shape", to_text(held.shape)}});
  }
  return {{"step", holdings.step},
          {"frozen_layers", holdings.frozen_layers},
          {"generation", holdings.generation},
          {"layers", std::move(layers)}};
}

Expected<Holdings> parse_holdings(const Json& json) {
  JsonObject object(json, "what a rank holds");
  Holdings holdings{.step = object.integer("step"),
                    .frozen_layers = static_cast<int>(object.integer("frozen_layers")),
                    .generation = object.integer("generation")};
  for (JsonObject& each : object.objects("layers")) {
    const auto id = static_cast<int>(each.integer("layer"));
    auto shape = model::parse_shape(each.string("shape"));
    if (!shape) each.fail("shape", shape.error().message);
    if (id < 0 || (!holdings.layers.empty() && holdings.layers.back().layer.value >= id)) {
      each.fail("layer", "is not above the one before");
    }
    DYNMO_TRY(each.finish());
    holdings.layers.push_back({LayerId(id), *std::move(shape)});
  }
  DYNMO_TRY(object.finish());
  return holdings;
}

Expected<std::vector<LayerTransfer>> choose_sources(const std::vector<Holdings>& by_rank,
                                                    const plan::Plan& plan,
                                                    const transport::Axes& axes) {
  DYNMO_CHECK(plan.ranks == axes.positions && std::ssize(by_rank) == axes.ranks(),
              "a plan and holdings of {} x {} ranks, got {} and {}", axes.replicas, axes.positions,
              plan.ranks, by_rank.size());
  DYNMO_TRY(newest(by_rank));
  const std::vector<Holders> holders = holders_of(by_rank, plan.layers());
  std::vector<LayerTransfer> moves;
  std::map<WorldRank, int> sends;
  for (int i = 0; i < plan.layers(); ++i) {
    const LayerId layer(i);
    const Holders& having = holders[layer.index()];
    if (having.empty()) {
      return make_error(ErrorCode::kNoCheckpoint, "no rank of the new group has layer {}", layer);
    }
    for (int replica = 0; replica < axes.replicas; ++replica) {
      const WorldRank to = axes.world_rank({replica, plan.owner(layer)});
      if (having.contains(to)) continue;
      const auto rating = [&](const auto& holder) {
        const bool elsewhere = axes.place(holder.first).replica != replica;
        return std::tuple(elsewhere, sends[holder.first], holder.first);
      };
      const auto source =
          std::min_element(having.begin(), having.end(),
                           [&](const auto& a, const auto& b) { return rating(a) < rating(b); });
      ++sends[source->first];
      moves.push_back({.layer = layer, .from = source->first, .to = to, .shape = source->second});
    }
  }
  return moves;
}

Expected<void> regroup(const transport::Grid& grid, const model::Model& model,
                       const plan::Plan& plan, RankState& mine, const Staging& staging) {
  mine.layers.merge(mine.spares);
  DYNMO_ASSIGN(const std::vector<Holdings> all, gather_holdings(grid.world(), mine));
  DYNMO_ASSIGN(const Holdings known, newest(all));
  DYNMO_TRY(share_sources(grid.world(), mine));
  DYNMO_TRY(share_controller(grid.world(), mine, all));
  DYNMO_CHECK(plan.generation > known.generation, "a generation after {}, got {}", known.generation,
              plan.generation);
  DYNMO_ASSIGN(const std::vector<LayerTransfer> moves, choose_sources(all, plan, grid.axes()));
  DYNMO_ASSIGN(const MigrationReport report,
               migrate(grid.world(), transport::control_tag(transport::Control::kHandover), model,
                       moves, mine, staging));
  if (!report.committed) return make_error(ErrorCode::kInternal, "{}", report.refusal);
  mine.plan = plan;
  mine.step = known.step;
  mine.frozen_layers = known.frozen_layers;
  mine.pruned.clear();
  for (const Holdings& theirs : all) {
    for (const Holdings::Layer& held : theirs.layers) {
      if (!held.shape.pruned.empty()) mine.pruned[held.layer] = held.shape;
    }
  }
  set_aside(mine, grid.position());
  make_whole(model, mine.layers);
  return {};
}

}  // namespace dynmo::runtime
