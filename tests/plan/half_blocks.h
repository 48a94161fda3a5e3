// SPDX-License-Identifier: Apache-2.0
#pragma once

// Chains of half blocks on ranks with a share of the memory that an even 1F1B cut takes.

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "dynmo/core/rng.h"
#include "dynmo/plan/propose.h"

namespace dynmo::plan {

inline constexpr std::int64_t kMegabyte = 1'000'000;

// Layers of 1 ms F, I and W each that save 10 MB and pass 1 MB on, without state. `drawn`: of
// unlike times and bytes around these.
inline cost::ModelCost half_blocks(int layers, std::optional<std::uint64_t> drawn = std::nullopt) {
  cost::ModelCost model;
  Rng rng(drawn.value_or(0));
  for (int i = 0; i < layers; ++i) {
    const auto around = [&](double value) {
      return drawn ? value * (0.6 + 0.8 * rng.uniform()) : value;
    };
    cost::LayerCost layer;
    layer.name = fmt::format("layer {}", i);
    layer.forward_s = around(1e-3);
    layer.backward_input_s = layer.backward_weight_s = layer.forward_s;
    layer.activation_bytes = Bytes{static_cast<std::int64_t>(around(10.0 * kMegabyte))};
    layer.boundary_bytes = Bytes{kMegabyte};
    model.layers.push_back(std::move(layer));
  }
  return model;
}

// `percent` of what the first rank of an even 1F1B cut saves.
inline cost::Cluster ranks_with(int ranks, const cost::ModelCost& model, int percent) {
  std::int64_t saved = 0;
  for (const cost::LayerCost& layer : model.layers) saved += layer.activation_bytes.value;
  return cost::equal_ranks(ranks, Bytes{saved * percent / 100});
}

inline Expected<Proposal> plan_for(const cost::ModelCost& model, const cost::Cluster& cluster,
                                   Recompute choice,
                                   schedule::ScheduleKind kind = schedule::ScheduleKind::k1F1B,
                                   Balancer balancer = Balancer::kOptimal,
                                   std::int64_t evaluations = 30) {
  const BalanceProblem problem{.model = model,
                               .cluster = cluster,
                               .micro_batches = 4 * cluster.size(),
                               .schedule = kind,
                               .recompute = choice};
  return propose(balancer, problem, {.evaluations = evaluations});
}

}  // namespace dynmo::plan
