// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/regroup.h"

#include <algorithm>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/files.h"
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
  DYNMO_ASSIGN(const auto texts,
               transport::gather_texts(group, transport::control_tag(transport::Control::kHoldings),
                                       to_text(holdings_of(mine))));
  std::vector<Holdings> all;
  for (const std::string& text : texts) {
    DYNMO_ASSIGN(Holdings theirs, parse_holdings(text));
    all.push_back(std::move(theirs));
  }
  return all;
}

// The first text that is not empty, the same on all ranks; "" where there is none.
Expected<std::string> first_text(transport::Transport& group, transport::Control use,
                                 const std::string& mine) {
  DYNMO_ASSIGN(const auto texts, transport::gather_texts(group, transport::control_tag(use), mine));
  for (const std::string& text : texts) {
    if (!text.empty()) return text;
  }
  return std::string();
}

// A rank that comes new learns what the sources of dynamism remember.
Expected<void> share_sources(transport::Transport& group, RankState& mine) {
  const std::string own = mine.layers.empty() ? "" : dynamism::state(mine.sources).dump();
  DYNMO_ASSIGN(const std::string text, first_text(group, transport::Control::kHoldings, own));
  if (!mine.sources.empty() || text.empty()) return {};
  DYNMO_ASSIGN(mine.source_state, parse_json(text, "sources of another rank"));
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

std::string to_text(const Holdings& holdings) {
  std::string text =
      fmt::format("{} {} {}", holdings.step, holdings.frozen_layers, holdings.generation);
  for (const Holdings::Layer& held : holdings.layers) {
    text += fmt::format(" {}{}", held.layer, to_text(held.shape));
  }
  return text;
}

Expected<Holdings> parse_holdings(std::string_view text) {
  std::istringstream stream{std::string(text)};
  Holdings holdings;
  stream >> holdings.step >> holdings.frozen_layers >> holdings.generation;
  bool good = !stream.fail();
  int id = 0;
  std::string shape_text;
  while (good && stream >> id) {
    good = static_cast<bool>(stream >> shape_text) && id >= 0 &&
           (holdings.layers.empty() || holdings.layers.back().layer.value < id);
    auto shape = model::parse_shape(shape_text);
    good = good && shape.has_value();
    if (good) holdings.layers.push_back({LayerId(id), *std::move(shape)});
  }
  if (good && stream.eof()) return holdings;
  return make_error(ErrorCode::kInternal, "'{}' is not what a rank says of its layers", text);
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

Expected<std::optional<cost::ModelCost>> share_costs(transport::Transport& group,
                                                     const std::optional<cost::ModelCost>& mine) {
  DYNMO_ASSIGN(const std::string text, first_text(group, transport::Control::kCosts,
                                                  mine ? cost::profile_json(*mine).dump() : ""));
  if (text.empty()) return std::optional<cost::ModelCost>();
  DYNMO_ASSIGN(const Json json, parse_json(text, "costs of another rank"));
  DYNMO_ASSIGN(cost::ModelCost costs, cost::parse_profile(json, "costs of another rank"));
  return std::optional(std::move(costs));
}

}  // namespace dynmo::runtime
