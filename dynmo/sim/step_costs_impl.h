// SPDX-License-Identifier: Apache-2.0
#pragma once

// The costs of one replay as plain integers: nanoseconds of a stage on its rank, and of a message
// on its link. They are computed once, so that the replay itself only adds and compares.

#include <cstdint>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/schedule/schedule.h"
#include "dynmo/sim/simulate.h"

namespace dynmo::sim {

struct StepCosts {
  static constexpr int kNoChannel = -1;
  struct Stage {
    std::int64_t forward = 0;
    std::int64_t input_gradient = 0;
    std::int64_t weight_gradient = 0;
    std::int64_t reduction = 0;  // 0 if frozen
    // 0 if frozen, because no W would end its stash.
    std::int64_t activation = 0;
    int activation_channel = kNoChannel;  // of the message that F waits for
    int gradient_channel = kNoChannel;    // of the message that B or I waits for
  };
  struct Channel {
    std::int64_t transfer = 0;  // from the start of a message to its arrival
    // Time for which a message occupies the network cards, if it queues.
    std::int64_t occupancy = 0;
    bool queues = false;         // between nodes whose cards have a limit
    std::uint32_t sender = 0;    // rank
    std::uint32_t receiver = 0;  // rank
    std::uint32_t egress = 0;    // node of the sender, numbered from 0 without gaps
    std::uint32_t ingress = 0;   // node of the receiver
  };
  std::vector<Stage> stages;
  std::vector<Channel> channels;
  std::size_t nodes = 0;
  std::int64_t action = 0;           // overhead before every action
  std::vector<std::int64_t> update;  // by rank
  std::vector<std::int64_t> state;   // by rank, bytes
  // The time for which each rank would be busy at the speed of the fastest rank that holds a stage.
  std::vector<std::int64_t> work;
};

// Computes the costs. Requires a valid shape.
//
// Returns kBadInput for costs or links that are negative or NaN, and for speeds that are not
// positive. Also returns it for a wrong number of stages or ranks, and for sums that do not fit 64
// bits.
[[nodiscard]] Expected<StepCosts> step_costs(const schedule::PipelineShape& shape,
                                             std::span<const StageCost> stages,
                                             const cost::Cluster& cluster);

}  // namespace dynmo::sim
