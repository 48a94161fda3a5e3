// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tied parameters (model::Tie) in a pipeline: the two layers may be on one rank or on two, and may
// move. Their gradients are added in one order, once at the end of a step, also where both layers
// are on one rank; so the number of ranks changes no bit.

#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/tie.h"
#include "dynmo/plan/plan.h"
#include "dynmo/runtime/engine.h"
#include "dynmo/runtime/staging.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// kBadInput: a layer or parameter that is not there, two of different shapes or weight decay, one
// in two ties.
[[nodiscard]] Expected<void> check_ties(const std::vector<model::Tie>& ties,
                                        const model::Model& model);

// Gives the second parameter of each tie the initial value of the first, where it is in `states`.
void take_initial_values(const std::vector<model::Tie>& ties, const model::Model& model,
                         std::uint64_t seed, LayerStates& states);

// Called by all ranks of a pipeline when the step's gradients are complete: both gradients of each
// tie become first + second. On two ranks they are exchanged on the second layer's reduction tag,
// in pieces of at most kPieceBytes. kPeerLost where a message failed.
[[nodiscard]] Expected<void> add_tied_gradients(transport::Transport& pipeline,
                                                const std::vector<model::Tie>& ties,
                                                const plan::Plan& plan, LayerStates& states,
                                                const Staging& staging = {});

// model::squared_norm without the parameters that are second in a tie: the model has them once.
[[nodiscard]] double squared_norm(const std::vector<model::Tie>& ties,
                                  const model::LayerState& state);

}  // namespace dynmo::runtime
