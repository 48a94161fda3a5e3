// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures the time of a step's messages while nothing else is in flight: the layers' own times do
// not include it, and the simulator needs it.

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/runtime/engine.h"
#include "dynmo/runtime/staging.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// Seconds of a message of this shape to the next rank whose both ends are posted: half of a round
// trip, median of nine, one pair of ranks after the other. Called by all ranks of `pipeline`; 0 on
// the last one, which has no next.
[[nodiscard]] Expected<double> message_time_s(transport::Transport& pipeline, transport::Tag tag,
                                              const std::vector<std::int64_t>& shape,
                                              at::ScalarType type);

// Measures the rate of a ring's links where all layers' gradients are reduced at once, as at the
// end of a step: each rank sends 2 (R - 1) / R of them to its neighbour. Called by all R of
// `peers`, two or more; sums the gradients.
[[nodiscard]] Expected<double> reduction_bytes_per_s(transport::Transport& peers,
                                                     LayerStates& states, const Staging& staging);

}  // namespace dynmo::runtime
