// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/snapshot.h"

#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/dynamism/training/source.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/runtime/side_copies.h"

namespace dynmo::runtime {
namespace {

// Returns the transfers of each layer from its owner in every replica to its keeper, unless that is
// the owner.
std::vector<LayerTransfer> copies(const transport::Axes& axes, std::span<const WorldRank> keepers,
                                  const RankState& state) {
  std::vector<LayerTransfer> all;
  for (int i = 0; i < state.plan.layers(); ++i) {
    const LayerId layer(i);
    for (int replica = 0; replica < axes.replicas; ++replica) {
      const WorldRank owner = axes.world_rank({replica, state.plan.owner(layer)});
      const WorldRank keeper = keepers[owner.index()];
      if (keeper == owner) continue;
      all.push_back({.layer = layer, .from = owner, .to = keeper, .shape = shape_of(state, layer)});
    }
  }
  return all;
}

// Returns a copy in host memory. It reuses the memory of `before` if the shape is equal, because
// writing to new memory takes several times as long.
model::LayerState copy_of(const model::Layer& layer, const model::LayerState& live,
                          model::LayerState before, const Staging& staging) {
  const model::LayerState host = staging.to_host(live);
  const model::StateShape shape = model::shape_of(host);
  if (before.id != host.id || before.parameters.empty() || model::shape_of(before) != shape) {
    before = model::allocate_tensors_like(layer, host.id, shape);
    strip(before);
    model::complete_memory(before);
  }
  const auto from = model::tensors(host);
  const auto to = model::tensors(before);
  DYNMO_CHECK(from.size() == to.size(), "{} tensors, got {}", from.size(), to.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    DYNMO_CHECK(from[i].bytes.size() == to[i].bytes.size(), "{} bytes of {}, got {}",
                from[i].bytes.size(), from[i].name, to[i].bytes.size());
    std::memcpy(to[i].bytes.data(), from[i].bytes.data(), from[i].bytes.size());
  }
  before.optimizer_steps = host.optimizer_steps;
  before.random_key = host.random_key;
  return before;
}

// Copies the layers of a device to host memory, where the transport uses them, too.
LayerStates copies_beside(const LayerStates& layers, SideCopies& beside) {
  CopiedLayers copies = beside.copy(layers);
  copies.end.wait();
  for (auto& [id, layer] : copies.layers) strip(layer);
  return std::move(copies.layers);
}

}  // namespace

std::vector<WorldRank> keepers(std::span<const int> hosts) {
  const std::size_t ranks = hosts.size();
  const auto elsewhere = [&](std::size_t distance) {
    int count = 0;
    for (std::size_t i = 0; i < ranks; ++i) count += hosts[i] != hosts[(i + distance) % ranks];
    return count;
  };
  std::size_t best = ranks > 1 ? 1 : 0;
  for (std::size_t distance = 2; distance < ranks; ++distance) {
    if (elsewhere(distance) > elsewhere(best)) best = distance;
  }
  std::vector<WorldRank> all;
  for (std::size_t i = 0; i < ranks; ++i) {
    all.emplace_back(static_cast<int>((i + best) % ranks));
  }
  return all;
}

Expected<MigrationReport> take_snapshot(const transport::Grid& grid, transport::Tag vote_tag,
                                        const model::Model& model,
                                        std::span<const WorldRank> keepers,
                                        const control::Controller& controller, RankState& state,
                                        const Staging& staging) {
  DYNMO_CHECK(std::ssize(keepers) == grid.axes().ranks(),
              "who keeps the layers of {} ranks, got {}", grid.axes().ranks(), keepers.size());
  const auto start = std::chrono::steady_clock::now();
  state.arriving.clear();
  std::optional<LayerStates> own;
  if (staging.beside) own = copies_beside(state.layers, *staging.beside);
  DYNMO_ASSIGN(MigrationReport report,
               copy_layers(grid.world(), vote_tag, model, copies(grid.axes(), keepers, state),
                           own ? *own : state.layers, state.arriving, Arrival::kStays,
                           own ? Staging{} : staging));
  if (!report.committed) {
    state.arriving.clear();
    return report;
  }
  // Until the new snapshot is stored, the live layers take the place of the old one.
  Snapshot snapshot = state.snapshot ? *std::exchange(state.snapshot, std::nullopt) : Snapshot();
  snapshot.neighbours = std::exchange(state.arriving, {});
  LayerStates before = std::exchange(snapshot.own, {});
  if (own) snapshot.own = *std::move(own);
  for (const auto& [id, layer] : state.layers) {
    if (snapshot.own.contains(id)) continue;
    auto old = before.extract(id);
    snapshot.own.emplace(id, copy_of(*model[id.index()], layer,
                                     old ? std::move(old.mapped()) : model::LayerState(), staging));
  }
  snapshot.step = state.step;
  snapshot.asked = state.asked;
  snapshot.frozen_layers = state.frozen_layers;
  snapshot.source_state = dynamism::state(state.sources);
  snapshot.controller = controller;
  state.snapshot = std::move(snapshot);
  report.seconds = seconds_since(start);
  return report;
}

}  // namespace dynmo::runtime
