// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/regroup.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/json.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::runtime {
namespace {

using elastic::CopyKind;
using Holders = std::map<WorldRank, model::StateShape>;

constexpr std::array<std::string_view, 4> kKinds = {"live", "shadow", "own", "neighbour"};
constexpr int kTries = 3;  // to send the layers

// Returns whether training can continue from this copy as it is.
bool is_live(const Holdings::Layer& held) {
  return held.copy.kind == CopyKind::kLive || held.copy.kind == CopyKind::kShadow;
}
bool serves(const Holdings::Layer& held, std::int64_t step) {
  return is_live(held) && held.copy.step == step;
}
bool brings(const Holdings& theirs, std::int64_t step) {
  return std::ranges::any_of(theirs.layers, [&](const auto& held) { return serves(held, step); });
}

// Returns the first rank with layers of that step.
Expected<std::size_t> first_that_brings(const std::vector<Holdings>& by_rank, std::int64_t step) {
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (brings(by_rank[rank], step)) return rank;
  }
  return make_error(ErrorCode::kNoCheckpoint, "no rank of the new group has layers");
}

std::vector<Holders> holders_of(const std::vector<Holdings>& by_rank, std::int64_t step,
                                int layers) {
  std::vector<Holders> all(static_cast<std::size_t>(layers));
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const Holdings::Layer& held : by_rank[rank].layers) {
      if (!serves(held, step)) continue;
      all[held.copy.layer.index()].emplace(WorldRank(static_cast<int>(rank)), held.shape);
    }
  }
  return all;
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

enum class Sharing {
  kNewRanks,  // receive what the others know
  kAllRanks,  // receive what `first` knows
};

// Sends the state of the sources of dynamism and of the controller from rank `first` to the others.
Expected<void> share_memory(transport::Transport& group, RankState& mine,
                            const std::vector<Holdings>& all, std::size_t first, Sharing sharing) {
  const bool sends = group.rank().index() == first;
  Json own;
  if (sends) own = mine.sources.empty() ? mine.source_state : dynamism::state(mine.sources);
  DYNMO_ASSIGN(Json theirs,
               transport::first_json(group, transport::control_tag(transport::Control::kHoldings),
                                     own, "sources of another rank"));
  if (!sends && !theirs.is_null() && (sharing == Sharing::kAllRanks || mine.sources.empty())) {
    mine.sources.clear();
    mine.source_state = std::move(theirs);
  }
  // The controller's state is large, so it is sent only if a rank may need it.
  const auto is_new = [](const Holdings& held) { return held.layers.empty(); };
  if (sharing == Sharing::kNewRanks && std::ranges::none_of(all, is_new)) return {};
  DYNMO_ASSIGN(theirs,
               transport::first_json(group, transport::control_tag(transport::Control::kCosts),
                                     sends && mine.controller ? mine.controller->state() : Json(),
                                     "controller of another rank"));
  if (!sends && (sharing == Sharing::kAllRanks || !mine.controller)) {
    mine.controller.reset();
    mine.controller_state = std::move(theirs);
  }
  return {};
}

// Brings the layers of step `wanted` to their places under `plan`. Without `wanted`, brings the
// live layers.
Expected<void> bring_together(std::optional<std::int64_t> wanted, const transport::Grid& grid,
                              const model::Model& model, const plan::Plan& plan, RankState& mine,
                              const Staging& staging) {
  DYNMO_ASSIGN(const std::vector<Holdings> all, gather_holdings(grid.world(), mine));
  std::int64_t step = wanted.value_or(0);
  if (!wanted) {
    DYNMO_ASSIGN(step, step_of(all));
  }
  DYNMO_ASSIGN(const std::size_t first, first_that_brings(all, step));
  DYNMO_TRY(share_memory(grid.world(), mine, all, first,
                         wanted ? Sharing::kAllRanks : Sharing::kNewRanks));
  for (const Holdings& theirs : all) {
    DYNMO_CHECK(plan.generation > theirs.generation || theirs.layers.empty(),
                "a generation after {}, got {}", theirs.generation, plan.generation);
  }
  DYNMO_ASSIGN(const std::vector<LayerTransfer> moves,
               choose_sources(all, step, plan, grid.axes()));
  mine.layers.merge(mine.spares);
  mine.layers.merge(mine.arriving);
  // After a loss no earlier group can continue, so a damaged copy is sent again.
  MigrationReport report;
  for (int left = wanted ? kTries : 1; left > 0 && !report.committed; --left) {
    DYNMO_ASSIGN(report,
                 migrate(grid.world(), transport::control_tag(transport::Control::kHandover), model,
                         moves, mine, staging));
  }
  if (!report.committed) return make_error(ErrorCode::kInternal, "{}", report.refusal);
  mine.plan = plan;
  mine.step = step;
  mine.frozen_layers = all[first].frozen_layers;
  mine.product_fit = all[first].product_fit;
  mine.asked = std::ranges::any_of(
      all, [&](const Holdings& theirs) { return theirs.asked && brings(theirs, step); });
  mine.pruned.clear();
  for (const Holdings& theirs : all) {
    for (const Holdings::Layer& held : theirs.layers) {
      if (serves(held, step) && !held.shape.pruned.empty()) {
        mine.pruned[held.copy.layer] = held.shape;
      }
    }
  }
  set_aside(mine, grid.position());
  make_whole(model, mine.layers);
  return {};
}

}  // namespace

Holdings holdings_of(const RankState& state) {
  std::map<std::pair<LayerId, CopyKind>, Holdings::Layer> found;
  const auto add = [&](const LayerStates& layers, std::int64_t step, CopyKind kind) {
    for (const auto& [id, layer] : layers) {
      found.emplace(std::pair(id, kind),
                    Holdings::Layer{.copy = {.layer = id, .step = step, .kind = kind},
                                    .shape = model::shape_of(layer)});
    }
  };
  add(state.layers, state.step, CopyKind::kLive);
  add(state.spares, state.step, CopyKind::kShadow);
  if (state.snapshot) {
    add(state.snapshot->own, state.snapshot->step, CopyKind::kOwn);
    add(state.snapshot->neighbours, state.snapshot->step, CopyKind::kNeighbour);
  }
  // These are newer than a neighbour's layers in the snapshot, which have another kind.
  add(state.arriving, state.step, CopyKind::kShadow);
  Holdings holdings{.frozen_layers = state.frozen_layers,
                    .generation = state.plan.generation,
                    .asked = state.asked,
                    .product_fit = state.product_fit};
  for (auto& [place, held] : found) holdings.layers.push_back(std::move(held));
  return holdings;
}

Json to_json(const Holdings& holdings) {
  Json layers = Json::array();
  for (const Holdings::Layer& held : holdings.layers) {
    layers.push_back({{"layer", held.copy.layer.value},
                      {"step", held.copy.step},
                      {"kind", kKinds[static_cast<std::size_t>(held.copy.kind)]},
                      {"shape", to_text(held.shape)}});
  }
  Json json = {{"frozen_layers", holdings.frozen_layers},
               {"generation", holdings.generation},
               {"asked", holdings.asked},
               {"layers", std::move(layers)}};
  if (const auto& fit = holdings.product_fit) {
    json["product_fit"] = {
        {"fixed", fit->fixed}, {"weights", fit->weights}, {"segments", fit->segments}};
  }
  return json;
}

Expected<Holdings> parse_holdings(const Json& json) {
  JsonObject object(json, "what a rank holds");
  Holdings holdings{.frozen_layers = static_cast<int>(object.integer("frozen_layers")),
                    .generation = object.integer("generation"),
                    .asked = object.boolean("asked")};
  if (auto fit = object.object("product_fit")) {
    const auto coefficient = [&](const char* key) {
      const double value = fit->number(key);
      if (value < 0) fit->fail(key, "is below 0");
      return value;
    };
    holdings.product_fit = {.fixed = coefficient("fixed"),
                            .weights = coefficient("weights"),
                            .segments = coefficient("segments")};
    DYNMO_TRY(fit->finish());
  }
  for (JsonObject& each : object.objects("layers")) {
    const auto id = static_cast<int>(each.integer("layer"));
    const std::int64_t step = each.integer("step");
    const auto kind = std::ranges::find(kKinds, each.string("kind"));
    auto shape = model::parse_shape(each.string("shape"));
    if (!shape) each.fail("shape", shape.error().message);
    if (kind == kKinds.end()) each.fail("kind", "is none of live, shadow, own, neighbour");
    const elastic::Holding copy{
        .layer = LayerId(id), .step = step, .kind = static_cast<CopyKind>(kind - kKinds.begin())};
    const auto place = [](const elastic::Holding& held) {
      return std::tuple(held.layer, held.kind);
    };
    if (id < 0 || (!holdings.layers.empty() && place(holdings.layers.back().copy) >= place(copy))) {
      each.fail("layer", "is not above the one before");
    }
    DYNMO_TRY(each.finish());
    holdings.layers.push_back({copy, *std::move(shape)});
  }
  DYNMO_TRY(object.finish());
  return holdings;
}

Expected<std::int64_t> step_of(const std::vector<Holdings>& by_rank) {
  std::optional<std::int64_t> found;
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const Holdings::Layer& held : by_rank[rank].layers) {
      if (!is_live(held)) continue;
      if (!found) found = held.copy.step;
      if (held.copy.step == *found) continue;
      return make_error(ErrorCode::kInternal, "rank {} brings layers of step {}, others of step {}",
                        rank, held.copy.step, *found);
    }
  }
  if (!found) return make_error(ErrorCode::kNoCheckpoint, "no rank of the new group has layers");
  return *found;
}

Expected<std::vector<LayerTransfer>> choose_sources(const std::vector<Holdings>& by_rank,
                                                    std::int64_t step, const plan::Plan& plan,
                                                    const transport::Axes& axes) {
  DYNMO_CHECK(plan.ranks == axes.positions && std::ssize(by_rank) == axes.ranks(),
              "a plan and holdings of {} x {} ranks, got {} and {}", axes.replicas, axes.positions,
              plan.ranks, by_rank.size());
  const std::vector<Holders> holders = holders_of(by_rank, step, plan.layers());
  std::vector<LayerTransfer> moves;
  std::map<WorldRank, int> sends;
  for (int i = 0; i < plan.layers(); ++i) {
    const LayerId layer(i);
    const Holders& having = holders[layer.index()];
    if (having.empty()) {
      return make_error(ErrorCode::kNoCheckpoint,
                        "no rank of the new group has layer {} of step {}", layer, step);
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
  return bring_together(std::nullopt, grid, model, plan, mine, staging);
}

Expected<void> regroup_at(std::int64_t step, const transport::Grid& grid, const model::Model& model,
                          const plan::Plan& plan, RankState& mine, const Staging& staging) {
  roll_back(mine, step);
  return bring_together(step, grid, model, plan, mine, staging);
}

}  // namespace dynmo::runtime
