// SPDX-License-Identifier: Apache-2.0
#pragma once

// Mixture of experts as a load model. The experts of a layer are on several devices of its stage.
// The layer waits for the device with most tokens. With every expert on one device and nothing
// dropped, a layer's work is constant. So expert parallelism makes layers unequal.
//
// The factor on the expert part of layer l is phi_l = max_r load_r / (k T). Each of R devices has a
// micro-batch of T tokens. load_r are the assignments to the experts of device r. Their mean is k
// T, since R k T are drawn. They are drawn from a popularity of experts that follows Zipf's law and
// drifts. It drifts fast in the first hundreds of steps and slowly after. (FlexMoE and Pro-Prophet
// depend on the similarity of adjacent steps.)

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"
#include "dynmo/dynamism/moe/options.h"

namespace dynmo::dynamism {

// Returns phi of one micro-batch: R max_r sum_{e on r} min(load_e, capacity) / sum_e load_e, or 1
// for no load. Device r has the experts [r E / R, (r + 1) E / R). Requires that R divides the
// experts.
[[nodiscard]] double straggler_factor(std::span<const double> expert_load, int expert_ranks,
                                      double capacity);

// Returns the popularity of `experts` experts, 1 / rank^skew, largest first, summing to 1.
[[nodiscard]] std::vector<double> zipf(int experts, double skew);

// Makes the load model, which scales every sublayer of kind kMoe. Arithmetic and moved bytes of its
// experts scale with the step's mean phi, and their stash with the largest. Their weights,
// gradients and optimizer state scale with 1 / R, its device's share. The router, attention,
// embedding and head are as in the dense model. Messages between the devices of a stage are not
// included. With MoeOptions::counts, phi is that of the recorded step. Returns kBadInput with the
// field, for a shape without experts, or for another number of experts than was recorded.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_moe(const MoeOptions& options,
                                                            const LoadInputs& inputs);

}  // namespace dynmo::dynamism
