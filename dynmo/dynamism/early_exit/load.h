// SPDX-License-Identifier: Apache-2.0
#pragma once

// Early exit as a load model: tokens whose prediction is already sure leave the model on the way,
// so that deep layers see few of them. Which share of the tokens is left before block l is
// rho_l = prod_{j < l} (1 - e_j); it never grows with depth, and falls while training goes on and
// the model gets surer.

#include <cstdint>
#include <memory>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/early_exit/options.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"

namespace dynmo::dynamism {

// rho before each of `blocks` blocks and, last, before the head, in [0, 1] and never growing. A
// function of (options, seed, step); `tokens` are those of a step. Requires valid options.
[[nodiscard]] std::vector<double> survivors(const EarlyExitOptions& options, int blocks,
                                            std::int64_t tokens, std::uint64_t seed,
                                            std::int64_t step);

// A sublayer works on, keeps and sends on survivors only (with a 4-byte index a token). A token's
// loss is taken where it leaves, with a head of the vocabulary's size: the MLP before an exit does
// the head's work for the tokens that leave, and for those that stay where they have a loss there
// (exit_loss) or the head's scores decide (confidence), and holds an untied exit head's weights; a
// test of its own is one product of 2 T h. With the model's head in slices an exit's is in as many:
// the layer before the exit has the first of them, the others are layers behind it. kBadInput
// naming the field.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_early_exit(const EarlyExitOptions& options,
                                                                   const LoadInputs& inputs);

// Returns the costs of layers when the shares `rho` of the tokens are left, as survivors() has
// them: given those of a training.
[[nodiscard]] Expected<cost::ModelCost> early_exit_costs(const EarlyExitOptions& options,
                                                         const LoadInputs& inputs,
                                                         const std::vector<double>& rho);

}  // namespace dynmo::dynamism
