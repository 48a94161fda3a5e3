// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include "dynmo/schedule/lowering.h"
#include "dynmo/sim/step_costs_impl.h"

namespace dynmo::sim {
namespace {

using schedule::ActionKind;
using schedule::PipelineShape;

// Times and bytes of a step must stay well inside 64 bits, at any order of additions.
constexpr double kLimit = 0x1p62;

Expected<void> check_counts(const PipelineShape& shape, std::size_t stages, int ranks) {
  if (stages != shape.stages.size()) {
    return make_error(ErrorCode::kBadInput, "costs of {} stages for a schedule of {}; want as many",
                      stages, shape.stages.size());
  }
  if (ranks != shape.ranks) {
    return make_error(ErrorCode::kBadInput,
                      "a cluster of {} ranks for a schedule of {}; want as "
                      "many",
                      ranks, shape.ranks);
  }
  return {};
}

Expected<void> check_stage(const StageCost& stage, std::size_t index) {
  const std::array<std::pair<std::string_view, std::int64_t>, 8> fields = {
      std::pair{"forward", stage.forward.count()},
      {"input_gradient", stage.input_gradient.count()},
      {"weight_gradient", stage.weight_gradient.count()},
      {"update", stage.update.count()},
      {"reduction", stage.reduction.count()},
      {"state", stage.state.value},
      {"activation", stage.activation.value},
      {"boundary", stage.boundary.value}};
  for (const auto& [field, value] : fields) {
    if (value >= 0) continue;
    return make_error(ErrorCode::kBadInput, "stage {} has {} {}; want 0 or more", index, field,
                      value);
  }
  return {};
}

Expected<void> check_link(const cost::Link& link, std::string_view name) {
  const bool latency = std::isfinite(link.latency_s) && link.latency_s >= 0;
  if (latency && link.bandwidth_bytes_per_s > 0) return {};
  return make_error(ErrorCode::kBadInput,
                    "the link {} has latency {} s and bandwidth {} bytes/s; want a latency of 0 or "
                    "more and a bandwidth above 0",
                    name, link.latency_s, link.bandwidth_bytes_per_s);
}

Expected<void> check_cluster(const cost::Cluster& cluster) {
  for (std::size_t r = 0; r < cluster.ranks.size(); ++r) {
    const double speed = cluster.ranks[r].speed;
    if (std::isfinite(speed) && speed > 0) continue;
    return make_error(ErrorCode::kBadInput, "rank {} has speed {}; want a number above 0", r,
                      speed);
  }
  DYNMO_TRY(check_link(cluster.inside_node, "inside a node"));
  DYNMO_TRY(check_link(cluster.between_nodes, "between nodes"));
  if (cluster.between_switches) {
    DYNMO_TRY(check_link(*cluster.between_switches, "between switches"));
  }
  if (!std::isfinite(cluster.action_s) || cluster.action_s < 0) {
    return make_error(ErrorCode::kBadInput, "the overhead of an action is {} s; want 0 or more",
                      cluster.action_s);
  }
  if (cluster.nic_bandwidth_bytes_per_s > 0) return {};
  return make_error(ErrorCode::kBadInput,
                    "network cards of nodes have bandwidth {} bytes/s; want more than 0",
                    cluster.nic_bandwidth_bytes_per_s);
}

double slowed(Nanoseconds time, double speed) { return static_cast<double>(time.count()) / speed; }

// Returns time / speed, rounded. Speed 1 changes nothing, even above 2^53 ns.
std::int64_t rounded(Nanoseconds time, double speed) {
  return speed == 1 ? time.count() : std::llround(slowed(time, speed));
}

struct Ends {
  Rank from;
  Rank to;
};

// Returns the ranks between which messages cross the boundary behind stage `boundary`.
Ends ends_of(const PipelineShape& shape, std::size_t boundary, bool gradient) {
  const Rank low = shape.stages[boundary].rank;
  const Rank high = shape.stages[boundary + 1].rank;
  return gradient ? Ends{high, low} : Ends{low, high};
}

bool crosses_nodes(const cost::Cluster& cluster, Ends ends) {
  return cluster.ranks[ends.from.index()].node != cluster.ranks[ends.to.index()].node;
}

// Returns the seconds of a message. Between nodes its bandwidth is the lower one of link and
// network cards.
double transfer_s(const cost::Cluster& cluster, Ends ends, Bytes bytes) {
  const cost::Link& link = cluster.link(ends.from, ends.to);
  const double bandwidth =
      crosses_nodes(cluster, ends)
          ? std::min(link.bandwidth_bytes_per_s, cluster.nic_bandwidth_bytes_per_s)
          : link.bandwidth_bytes_per_s;
  return link.latency_s + static_cast<double>(bytes.value) / bandwidth;
}

int incoming(const PipelineShape& shape, ActionKind receive, StageId stage) {
  if (!exchanges(shape, receive, stage)) return StepCosts::kNoChannel;
  return schedule::channel({.kind = receive, .stage = stage, .micro_batch = MicroBatchId{0}});
}

// Checks that sums stay in range. The sum of all work and all messages bounds every time of the
// replay, and the sum of all memory bounds every amount.
Expected<void> check_sums(const PipelineShape& shape, std::span<const StageCost> stages,
                          const cost::Cluster& cluster) {
  const double micro_batches = shape.micro_batches;
  double nanoseconds = 0;
  double bytes = 0;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const StageCost& stage = stages[s];
    const double speed = cluster.ranks[shape.stages[s].rank.index()].speed;
    nanoseconds +=
        micro_batches * (slowed(stage.forward, speed) + slowed(stage.input_gradient, speed) +
                         slowed(stage.weight_gradient, speed)) +
        3 * micro_batches * 1e9 * cluster.action_s + slowed(stage.update, speed) +
        static_cast<double>(stage.reduction.count());
    bytes += static_cast<double>(stage.state.value) +
             micro_batches * static_cast<double>(stage.activation.value);
    if (s + 1 == stages.size()) break;
    for (const bool gradient : {false, true}) {
      nanoseconds +=
          micro_batches * 1e9 * transfer_s(cluster, ends_of(shape, s, gradient), stage.boundary);
    }
  }
  if (nanoseconds <= kLimit && bytes <= kLimit) return {};
  return make_error(
      ErrorCode::kBadInput,
      "a step of up to {:.3g} s and {:.3g} bytes; want less than 2^62 nanoseconds and "
      "bytes, check the units of the costs",
      nanoseconds * 1e-9, bytes);
}

double fastest_used(const PipelineShape& shape, const cost::Cluster& cluster) {
  double fastest = 0;
  for (const schedule::StageShape& stage : shape.stages) {
    fastest = std::max(fastest, cluster.ranks[stage.rank.index()].speed);
  }
  return fastest;
}

// Returns the nanoseconds that a rank of this speed is busy with the stage in a step.
std::int64_t busy_time(const StageCost& stage, bool frozen, int micro_batches, double speed) {
  const std::int64_t forward = rounded(stage.forward, speed);
  if (frozen) return micro_batches * forward;
  return micro_batches * (forward + rounded(stage.input_gradient, speed) +
                          rounded(stage.weight_gradient, speed)) +
         rounded(stage.update, speed);
}

StepCosts::Stage stage_of(const PipelineShape& shape, const StageCost& stage, std::size_t index,
                          double speed) {
  const StageId id(static_cast<std::int32_t>(index));
  const bool frozen = shape.stages[index].frozen;
  return {.forward = rounded(stage.forward, speed),
          .input_gradient = rounded(stage.input_gradient, speed),
          .weight_gradient = rounded(stage.weight_gradient, speed),
          .reduction = frozen ? 0 : stage.reduction.count(),
          .activation = frozen ? 0 : stage.activation.value,
          .activation_channel = incoming(shape, ActionKind::kReceiveActivation, id),
          .gradient_channel = incoming(shape, ActionKind::kReceiveGradient, id)};
}

// Returns the costs of a channel. Its nodes are indices into `nodes`, which has all node numbers in
// order.
StepCosts::Channel channel_of(const cost::Cluster& cluster, const std::vector<int>& nodes,
                              Ends ends, Bytes bytes) {
  const auto node = [&](Rank rank) {
    const int number = cluster.ranks[rank.index()].node;
    return static_cast<std::uint32_t>(std::lower_bound(nodes.begin(), nodes.end(), number) -
                                      nodes.begin());
  };
  StepCosts::Channel channel;
  channel.transfer = to_nanoseconds(transfer_s(cluster, ends, bytes)).count();
  channel.sender = static_cast<std::uint32_t>(ends.from.index());
  channel.receiver = static_cast<std::uint32_t>(ends.to.index());
  channel.egress = node(ends.from);
  channel.ingress = node(ends.to);
  const double card = cluster.nic_bandwidth_bytes_per_s;
  channel.queues = std::isfinite(card) && crosses_nodes(cluster, ends);
  if (channel.queues) {
    channel.occupancy = to_nanoseconds(static_cast<double>(bytes.value) / card).count();
  }
  return channel;
}

std::vector<int> nodes_of(const cost::Cluster& cluster) {
  std::vector<int> nodes;
  for (const cost::ClusterRank& rank : cluster.ranks) nodes.push_back(rank.node);
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
  return nodes;
}

}  // namespace

Expected<StepCosts> step_costs(const PipelineShape& shape, std::span<const StageCost> stages,
                               const cost::Cluster& cluster) {
  DYNMO_TRY(check_counts(shape, stages.size(), cluster.size()));
  DYNMO_TRY(check_cluster(cluster));
  for (std::size_t s = 0; s < stages.size(); ++s) DYNMO_TRY(check_stage(stages[s], s));
  DYNMO_TRY(check_sums(shape, stages, cluster));

  StepCosts costs;
  const std::vector<int> nodes = nodes_of(cluster);
  costs.nodes = nodes.size();
  costs.action = to_nanoseconds(cluster.action_s).count();
  costs.update.resize(cluster.ranks.size(), 0);
  costs.state.resize(cluster.ranks.size(), 0);
  costs.work.resize(cluster.ranks.size(), 0);
  const double fastest = fastest_used(shape, cluster);
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const auto [rank, frozen] = shape.stages[s];
    const double speed = cluster.ranks[rank.index()].speed;
    costs.stages.push_back(stage_of(shape, stages[s], s, speed));
    if (!frozen) costs.update[rank.index()] += rounded(stages[s].update, speed);
    costs.state[rank.index()] += stages[s].state.value;
    costs.work[rank.index()] += busy_time(stages[s], frozen, shape.micro_batches, fastest);
    if (s + 1 == stages.size()) break;
    for (const bool gradient : {false, true}) {  // in the order of channel()
      costs.channels.push_back(
          channel_of(cluster, nodes, ends_of(shape, s, gradient), stages[s].boundary));
    }
  }
  return costs;
}

}  // namespace dynmo::sim
