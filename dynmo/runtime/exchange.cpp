// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/exchange.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "dynmo/transport/gather.h"

namespace dynmo::runtime {

// One vector of doubles a rank: six of every layer and the losses (read from their owner), then the
// rank's own.
Expected<Exchange> exchange(const Grid& grid, transport::Tag tag, const plan::Plan& plan,
                            int micro_batches, const OwnFigures& own) {
  const auto layers = static_cast<std::size_t>(plan.layers());
  constexpr std::size_t kPerLayer = 6;
  const std::size_t first_loss = kPerLayer * layers;
  const std::size_t first_own = first_loss + static_cast<std::size_t>(micro_batches);
  std::vector<double> mine(first_own + 4, 0.0);
  for (const auto& [id, layer] : own.layers) {
    double* to = &mine[kPerLayer * id.index()];
    to[0] = layer.sample.time.forward_s;
    to[1] = layer.sample.time.input_gradient_s;
    to[2] = layer.sample.time.weight_gradient_s;
    to[3] = layer.sample.update_s;
    to[4] = layer.squared_norm;
    to[5] = static_cast<double>(layer.sample.stash_bytes.value);
  }
  std::copy(own.losses.begin(), own.losses.end(),
            mine.begin() + static_cast<std::ptrdiff_t>(first_loss));
  mine[first_own] = own.busy_s;
  mine[first_own + 1] = own.overhead_s;
  mine[first_own + 2] = own.plan_s;
  mine[first_own + 3] = own.migrate_s;

  DYNMO_ASSIGN(const auto all, transport::gather_numbers(grid.world(), tag, mine));
  const auto of = [&](int replica, Rank rank) -> const std::vector<double>& {
    return all[grid.world_rank(replica, rank).index()];
  };
  Exchange whole;
  for (std::size_t i = 0; i < layers; ++i) {
    const Rank owner = plan.owner(LayerId(static_cast<int>(i)));
    // Times are means over the replicas; the gradients are the same in all.
    std::array<double, kPerLayer> sum{};
    for (int replica = 0; replica < grid.replicas(); ++replica) {
      const double* layer = &of(replica, owner)[kPerLayer * i];
      for (std::size_t k = 0; k < kPerLayer; ++k) sum[k] += layer[k];
    }
    for (double& value : sum) value /= grid.replicas();
    whole.layers.push_back({.time = {sum[0], sum[1], sum[2]},
                            .update_s = sum[3],
                            .stash_bytes = Bytes{static_cast<std::int64_t>(sum[5])}});
    whole.squared_norms.push_back(of(0, owner)[kPerLayer * i + 4]);
  }
  for (int replica = 0; replica < grid.replicas(); ++replica) {
    const auto* losses = &of(replica, plan.stages.back().rank)[first_loss];
    whole.losses.insert(whole.losses.end(), losses, losses + micro_batches);
  }
  whole.overhead_s = own.overhead_s;
  for (const auto& rank : all) {
    const double* theirs = &rank[first_own];
    whole.busy_s.push_back(theirs[0]);
    whole.overhead_s = std::min(whole.overhead_s, theirs[1]);
    whole.plan_s = std::max(whole.plan_s, theirs[2]);
    whole.migrate_s = std::max(whole.migrate_s, theirs[3]);
  }
  return whole;
}

}  // namespace dynmo::runtime
