// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/exchange.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "dynmo/transport/gather.h"

namespace dynmo::runtime {

namespace {

// A rank's own figures, at the end of its numbers.
constexpr std::array kOwn = {&OwnFigures::busy_s,    &OwnFigures::overhead_s,
                             &OwnFigures::plan_s,    &OwnFigures::migrate_s,
                             &OwnFigures::beside_s,  &OwnFigures::actions,
                             &OwnFigures::message_s, &OwnFigures::reduction_bytes_per_s};

// What all ranks make of it alike.
StepSample step_sample(const std::vector<OwnFigures>& ranks) {
  StepSample sample;
  const auto least = [&](double OwnFigures::*field) {
    std::optional<double> found;
    for (const OwnFigures& own : ranks) {
      if (own.*field > 0) found = std::min(found.value_or(own.*field), own.*field);
    }
    return found;
  };
  sample.overhead_s = least(&OwnFigures::overhead_s);  // that of the others has their waiting in it
  sample.reduction_bytes_per_s = least(&OwnFigures::reduction_bytes_per_s);
  double seconds = 0;
  double actions = 0;
  double messages_s = 0;
  int measured = 0;
  for (const OwnFigures& own : ranks) {
    seconds += own.beside_s;
    actions += own.actions;
    messages_s += own.message_s;
    measured += own.message_s > 0 ? 1 : 0;
  }
  if (actions > 0) sample.action_s = seconds / actions;
  if (measured > 0) sample.message_s = messages_s / measured;
  return sample;
}

}  // namespace

// One vector of doubles a rank: six of every layer and the losses (read from their owner), then the
// rank's own.
Expected<Exchange> exchange(const Grid& grid, transport::Tag tag, const plan::Plan& plan,
                            int micro_batches, const OwnFigures& own) {
  const auto layers = static_cast<std::size_t>(plan.layers());
  constexpr std::size_t kPerLayer = 6;
  const std::size_t first_loss = kPerLayer * layers;
  const std::size_t first_own = first_loss + static_cast<std::size_t>(micro_batches);
  std::vector<double> mine(first_own + kOwn.size(), 0.0);
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
  for (std::size_t k = 0; k < kOwn.size(); ++k) mine[first_own + k] = own.*kOwn[k];

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
  std::vector<OwnFigures> ranks;
  for (const auto& numbers : all) {
    OwnFigures& theirs = ranks.emplace_back();
    for (std::size_t k = 0; k < kOwn.size(); ++k) theirs.*kOwn[k] = numbers[first_own + k];
    whole.busy_s.push_back(theirs.busy_s);
    whole.plan_s = std::max(whole.plan_s, theirs.plan_s);
    whole.migrate_s = std::max(whole.migrate_s, theirs.migrate_s);
  }
  whole.beside = step_sample(ranks);
  return whole;
}

}  // namespace dynmo::runtime
