// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures the time of a step's messages while nothing else is in flight. The layers' own times do
// not include it, and the simulator needs it.

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/runtime/engine.h"
#include "dynmo/runtime/staging.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// Returns the seconds of a message of this shape to the next rank, with both ends posted. It is
// half of a round trip, the median of nine. One pair of ranks measures at a time. All ranks of
// `pipeline` call it. The last one has no next rank and gets 0. Fails with kPeerLost.
[[nodiscard]] Expected<double> message_time_s(transport::Transport& pipeline, transport::Tag tag,
                                              const std::vector<std::int64_t>& shape,
                                              at::ScalarType type);

// Returns the bytes per second of a link while the gradients of all layers are reduced at once.
// Each of the R ranks sends 2 (R - 1) / R of the gradients. All of `peers` call it, two or more.
// The gradients are summed, as at the end of a step. Fails with kPeerLost.
[[nodiscard]] Expected<double> reduction_bytes_per_s(transport::Transport& peers,
                                                     LayerStates& states, const Staging& staging);

}  // namespace dynmo::runtime
