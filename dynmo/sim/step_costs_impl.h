// SPDX-License-Identifier: Apache-2.0
#pragma once

// The costs of one replay as plain integers: nanoseconds on the rank that runs the stage, and of a
// message on the link it takes. Made once, so that the replay itself only adds and compares.

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
    std::int64_t reduction = 0;           // 0 if frozen
    std::int64_t activation = 0;          // 0 if frozen: no W would end its stash
    int activation_channel = kNoChannel;  // that F waits on
    int gradient_channel = kNoChannel;    // that B or I waits on
  };
  struct Channel {
    std::int64_t transfer = 0;   // from the start of a message to its arrival
    std::int64_t occupancy = 0;  // of the network cards by a message, if it queues
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
  // For each rank, the time it would be busy at the speed of the fastest rank that holds a stage.
  std::vector<std::int64_t> work;
};

// Requires a valid shape. kBadInput: costs or links that are negative or NaN, speeds that are not
// positive, the wrong number of stages or ranks, sums that do not fit 64 bits.
[[nodiscard]] Expected<StepCosts> step_costs(const schedule::PipelineShape& shape,
                                             std::span<const StageCost> stages,
                                             const cost::Cluster& cluster);

}  // namespace dynmo::sim
