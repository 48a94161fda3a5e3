// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tied parameters (model::Tie) in a pipeline. The two layers may be on one rank or on two, and may
// move. Their gradients are added in one order, once at the end of a step, also if both are on one
// rank. So the number of ranks changes no bit.

#include <cstdint>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/tie.h"
#include "dynmo/plan/plan.h"
#include "dynmo/runtime/engine.h"
#include "dynmo/runtime/staging.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// Returns kBadInput for a layer or parameter that does not exist, and for two of different shapes
// or weight decay. Also returns it for a parameter in two ties.
[[nodiscard]] Expected<void> check_ties(const std::vector<model::Tie>& ties,
                                        const model::Model& model);

// Gives the second parameter of each tie in `states` the initial value of the first one.
void take_initial_values(const std::vector<model::Tie>& ties, const model::Model& model,
                         std::uint64_t seed, LayerStates& states);

// Adds the gradients of each tie: both become first + second. All ranks of a pipeline call it when
// the step's gradients are complete. Two ranks exchange them on the second layer's reduction tag,
// in pieces of at most kPieceBytes. Returns kPeerLost if a message failed.
[[nodiscard]] Expected<void> add_tied_gradients(transport::Transport& pipeline,
                                                const std::vector<model::Tie>& ties,
                                                const plan::Plan& plan, LayerStates& states,
                                                const Staging& staging = {});

// Returns whether the parameter is the second one in a tie.
[[nodiscard]] bool is_second(const std::vector<model::Tie>& ties, LayerId layer,
                             std::string_view parameter);
// Like model::squared_norm(), without the parameters that are second in a tie, because the model
// has them once.
[[nodiscard]] double squared_norm(const std::vector<model::Tie>& ties,
                                  const model::LayerState& state);

}  // namespace dynmo::runtime
