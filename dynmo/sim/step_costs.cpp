// SPDX-License-Identifier: Apache-2.0
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
  const std::array<std::pair<std::string_view, std::int64_t>, 7> fields = {
      std::pair{"forward", stage.forward.count()},
      {"input_gradient", stage.input_gradient.count()},
      {"weight_gradient", stage.weight_gradient.count()},
      {"update", stage.update.count()},
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
  return check_link(cluster.between_nodes, "between nodes");
}

double slowed(Nanoseconds time, double speed) { return static_cast<double>(time.count()) / speed; }

// Speed 1 must change nothing, also where a double has no longer all nanoseconds.
std::int64_t rounded(Nanoseconds time, double speed) {
  return speed == 1 ? time.count() : std::llround(slowed(time, speed));
}

double transfer_s(const cost::Link& link, Bytes bytes) {
  return link.latency_s + static_cast<double>(bytes.value) / link.bandwidth_bytes_per_s;
}

const cost::Link& boundary_link(const PipelineShape& shape, const cost::Cluster& cluster,
                                std::size_t boundary, bool gradient) {
  const Rank low = shape.stages[boundary].rank;
  const Rank high = shape.stages[boundary + 1].rank;
  return gradient ? cluster.link(high, low) : cluster.link(low, high);
}

int incoming(const PipelineShape& shape, ActionKind receive, StageId stage) {
  if (!exchanges(shape, receive, stage)) return StepCosts::kNoChannel;
  return schedule::channel({.kind = receive, .stage = stage, .micro_batch = MicroBatchId{0}});
}

// All work and all messages one after the other, and all memory at once, bound any time and any
// amount of the replay.
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
        slowed(stage.update, speed);
    bytes += static_cast<double>(stage.state.value) +
             micro_batches * static_cast<double>(stage.activation.value);
    if (s + 1 == stages.size()) break;
    for (const bool gradient : {false, true}) {
      nanoseconds += micro_batches * 1e9 *
                     transfer_s(boundary_link(shape, cluster, s, gradient), stage.boundary);
    }
  }
  if (nanoseconds <= kLimit && bytes <= kLimit) return {};
  return make_error(
      ErrorCode::kBadInput,
      "a step of up to {:.3g} s and {:.3g} bytes; want less than 2^62 nanoseconds and "
      "bytes, check the units of the costs",
      nanoseconds * 1e-9, bytes);
}

}  // namespace

Expected<StepCosts> step_costs(const PipelineShape& shape, std::span<const StageCost> stages,
                               const cost::Cluster& cluster) {
  DYNMO_TRY(check_counts(shape, stages.size(), cluster.size()));
  DYNMO_TRY(check_cluster(cluster));
  for (std::size_t s = 0; s < stages.size(); ++s) DYNMO_TRY(check_stage(stages[s], s));
  DYNMO_TRY(check_sums(shape, stages, cluster));

  StepCosts costs;
  costs.update.resize(cluster.ranks.size(), 0);
  costs.state.resize(cluster.ranks.size(), 0);
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const schedule::StageShape& where = shape.stages[s];
    const double speed = cluster.ranks[where.rank.index()].speed;
    const StageId id(static_cast<std::int32_t>(s));
    costs.stages.push_back(
        {.forward = rounded(stages[s].forward, speed),
         .input_gradient = rounded(stages[s].input_gradient, speed),
         .weight_gradient = rounded(stages[s].weight_gradient, speed),
         .activation = where.frozen ? 0 : stages[s].activation.value,
         .activation_channel = incoming(shape, ActionKind::kReceiveActivation, id),
         .gradient_channel = incoming(shape, ActionKind::kReceiveGradient, id)});
    if (!where.frozen) costs.update[where.rank.index()] += rounded(stages[s].update, speed);
    costs.state[where.rank.index()] += stages[s].state.value;
    if (s + 1 == stages.size()) break;
    for (const bool gradient : {false, true}) {  // in the order of channel()
      const cost::Link& link = boundary_link(shape, cluster, s, gradient);
      costs.transfer.push_back(to_nanoseconds(transfer_s(link, stages[s].boundary)).count());
    }
  }
  return costs;
}

}  // namespace dynmo::sim
