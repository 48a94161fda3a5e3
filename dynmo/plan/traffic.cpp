// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/traffic.h"

#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/schedule/lowering.h"

namespace dynmo::plan {
namespace {

constexpr std::int64_t kElementBytes = 4;  // of a gradient

WorldRank world_rank(Rank position, int replica, int positions) {
  return WorldRank(replica * positions + position.value);
}

std::int64_t messages_of(Bytes bytes) {
  return (bytes.value + kMaxMessage.value - 1) / kMaxMessage.value;
}

// Returns the messages that move one layer with `state` bytes.
MessageCount count_of(Bytes state) {
  return {2 + messages_of(state), state + kMoveHeader + kMoveDigest};
}

// Returns the bytes of a layer's gradients that replica `part` of `parts` sums.
Bytes part_of(Bytes gradients, int part, int parts) {
  const std::int64_t elements = gradients.value / kElementBytes;
  const auto end = [&](int count) {
    return count == parts ? gradients.value : elements * count / parts * kElementBytes;
  };
  return Bytes{end(part + 1) - end(part)};
}

// Adds the messages between the stages of one replica's pipeline.
void add_boundaries(std::vector<TrafficRow>& rows, const Plan& plan, const cost::ModelCost& model,
                    int micro_batches, int replica) {
  using schedule::ActionKind;
  const schedule::PipelineShape shape = shape_of(plan, micro_batches, model.frozen_layers());
  for (std::size_t s = 0; s + 1 < plan.stages.size(); ++s) {
    const StageId id(static_cast<std::int32_t>(s));
    const auto last = static_cast<std::size_t>(plan.stages[s].layers.end() - 1);
    const MessageCount count{micro_batches, model.layers[last].boundary_bytes * micro_batches};
    const WorldRank low = world_rank(plan.stages[s].rank, replica, plan.ranks);
    const WorldRank high = world_rank(plan.stages[s + 1].rank, replica, plan.ranks);
    if (schedule::exchanges(shape, ActionKind::kSendActivation, id)) {
      rows.push_back({low, high, Purpose::kActivation, count});
    }
    if (schedule::exchanges(shape, ActionKind::kReceiveGradient, id)) {
      rows.push_back({high, low, Purpose::kGradient, count});
    }
  }
}

// Adds the messages of one layer between its replicas. Each sends every other replica that one's
// part of the gradients, and then the sum of its own part.
void add_reduction(std::vector<TrafficRow>& rows, const cost::LayerCost& layer, Rank position,
                   int positions, int replicas) {
  if (layer.frozen || layer.gradient_bytes == Bytes{0}) return;
  for (int from = 0; from < replicas; ++from) {
    for (int to = 0; to < replicas; ++to) {
      if (from == to) continue;
      const Bytes scattered = part_of(layer.gradient_bytes, to, replicas);
      const Bytes gathered = part_of(layer.gradient_bytes, from, replicas);
      rows.push_back({world_rank(position, from, positions),
                      world_rank(position, to, positions),
                      Purpose::kReduction,
                      {messages_of(scattered) + messages_of(gathered), scattered + gathered}});
    }
  }
}

}  // namespace

TrafficRows traffic_of(const Plan& plan, const cost::ModelCost& model, int micro_batches,
                       int replicas) {
  DYNMO_CHECK(plan.layers() == model.size(), "a plan of {} layers, got {}", model.size(),
              plan.layers());
  DYNMO_CHECK(micro_batches >= 1 && replicas >= 1, "micro-batches and replicas, got {} and {}",
              micro_batches, replicas);
  std::vector<TrafficRow> rows;
  for (int replica = 0; replica < replicas; ++replica) {
    add_boundaries(rows, plan, model, micro_batches, replica);
  }
  if (replicas > 1) {
    const std::vector<Rank> ranks = owners(plan);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      add_reduction(rows, model.layers[i], ranks[i], plan.ranks, replicas);
    }
  }
  return sums_of(std::move(rows));
}

TrafficRows traffic_of_copies(const Plan& plan, const cost::ModelCost& model,
                              std::span<const WorldRank> keepers) {
  std::vector<TrafficRow> rows;
  const std::vector<Rank> ranks = owners(plan);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const Bytes bytes = moved_bytes(model.layers[i]);
    for (int replica = 0; replica < std::ssize(keepers) / plan.ranks; ++replica) {
      const WorldRank owner = world_rank(ranks[i], replica, plan.ranks);
      const WorldRank keeper = keepers[owner.index()];
      if (keeper != owner) rows.push_back({owner, keeper, Purpose::kMigration, count_of(bytes)});
    }
  }
  return sums_of(std::move(rows));
}

TrafficRows traffic_of(const Migration& migration, int positions, int replicas) {
  std::vector<TrafficRow> rows;
  for (const LayerMove& move : migration.moves) {
    for (int replica = 0; replica < replicas; ++replica) {
      rows.push_back({world_rank(move.from, replica, positions),
                      world_rank(move.to, replica, positions), Purpose::kMigration,
                      count_of(move.bytes)});
    }
  }
  return sums_of(std::move(rows));
}

TrafficRows traffic_of_gradients(const Migration& migration, const cost::ModelCost& model,
                                 int positions, int replicas) {
  std::vector<TrafficRow> rows;
  for (const LayerMove& move : migration.moves) {
    const cost::LayerCost& layer = model.layers[move.layer.index()];
    if (layer.frozen || layer.gradient_bytes == Bytes{0}) continue;
    for (int replica = 0; replica < replicas; ++replica) {
      rows.push_back({world_rank(move.from, replica, positions),
                      world_rank(move.to, replica, positions),
                      Purpose::kMigration,
                      {messages_of(layer.gradient_bytes), layer.gradient_bytes}});
    }
  }
  return sums_of(std::move(rows));
}

MessageCount between_nodes(const TrafficRows& rows, const cost::Cluster& cluster) {
  MessageCount sum;
  for (const TrafficRow& row : rows) {
    if (row.from.value >= cluster.size() || row.to.value >= cluster.size()) continue;
    if (cluster.ranks[row.from.index()].node == cluster.ranks[row.to.index()].node) continue;
    sum.messages += row.count.messages;
    sum.bytes += row.count.bytes;
  }
  return sum;
}

}  // namespace dynmo::plan
