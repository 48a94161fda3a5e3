// SPDX-License-Identifier: Apache-2.0
#pragma once

// Mixture of experts as a load model: the experts of a layer lie on several devices of its stage,
// and the layer waits for the one that got most tokens. With every expert on one device and nothing
// dropped a layer's work is constant, so it is expert parallelism that makes layers unequal.
//
// The factor on the expert part of layer l is phi_l = max_r load_r / (k T): each of R devices
// brings a micro-batch of T tokens, load_r are the assignments to the experts of device r, and k T
// are the mean ones, since R k T are drawn. They are drawn from a popularity of experts that
// follows Zipf's law and drifts, fast in the first hundreds of steps and slowly after (FlexMoE and
// Pro-Prophet rest on adjacent steps being alike).

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"
#include "dynmo/dynamism/moe/options.h"

namespace dynmo::dynamism {

// phi of one micro-batch: R max_r sum_{e on r} min(load_e, capacity) / sum_e load_e; 1 where there
// is no load. Device r has the experts [r E / R, (r + 1) E / R). Requires R to divide the experts.
[[nodiscard]] double straggler_factor(std::span<const double> expert_load, int expert_ranks,
                                      double capacity);

// Popularity of `experts` experts, 1 / rank^skew, largest first, summing to 1.
[[nodiscard]] std::vector<double> zipf(int experts, double skew);

// Every sublayer of kind kMoe is scaled: arithmetic and moved bytes of its experts by the step's
// mean phi, their stash by the largest, their weights, gradients and optimizer state by 1 / R (its
// device's share). The router, attention, embedding and head are as in the dense model. Messages
// between the devices of a stage are not in it. With MoeOptions::counts phi
// is that of the recorded step. kBadInput naming the field; a shape without experts, or of other
// experts than were recorded.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_moe(const MoeOptions& options,
                                                            const LoadInputs& inputs);

}  // namespace dynmo::dynamism
