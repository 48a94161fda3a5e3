// SPDX-License-Identifier: Apache-2.0
#pragma once

// Early exit as a load model. Tokens whose prediction is already sure leave the model early, so
// deep layers have few tokens. The share of tokens left before block l is rho_l = prod_{j < l} (1 -
// e_j). It never grows with depth. It falls during training, as the model becomes more certain.

#include <cstdint>
#include <memory>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/early_exit/options.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"

namespace dynmo::dynamism {

// Returns rho, the share of the tokens that are left, before each of `blocks` blocks and, last,
// before the head. It is in [0, 1] and never grows. The result is a function of the arguments.
// `tokens` are those of a step. Requires valid options.
[[nodiscard]] std::vector<double> survivors(const EarlyExitOptions& options, int blocks,
                                            std::int64_t tokens, std::uint64_t seed,
                                            std::int64_t step);

// Makes the load model. A sublayer computes, stores and sends survivors only (with a 4-byte index a
// token). A token's loss is computed where it leaves, with a head of the vocabulary's size.
//
// So the MLP before an exit does the head's work for the tokens that leave. It also does so for
// staying tokens if they have a loss there (exit_loss), or if the head's scores decide
// (confidence). It also has the weights of the exit's head, unless they are tied. A classifier is
// one product of 2 T h. If the model's head is in slices, an exit's head has the same number. The
// layer before the exit has the first slice, and layers behind it have the others. Returns
// kBadInput with the field.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_early_exit(const EarlyExitOptions& options,
                                                                   const LoadInputs& inputs);

// Returns the costs of layers if the shares `rho` of the tokens are left, as survivors() returns
// them. The shares of a training may be used. Returns kBadInput with the field, as
// make_early_exit() does.
[[nodiscard]] Expected<cost::ModelCost> early_exit_costs(const EarlyExitOptions& options,
                                                         const LoadInputs& inputs,
                                                         const std::vector<double>& rho);

}  // namespace dynmo::dynamism
