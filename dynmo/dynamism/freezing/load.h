// SPDX-License-Identifier: Apache-2.0
#pragma once

// Layer freezing as a load model: layers stop training from the front, one after another, and a
// frozen prefix costs its forward pass only.
//
// The rule kSchedule is the ramp of MosaicML Composer's layer freezing. Egeria (Wang et al.,
// EuroSys'23), AutoFreeze (Liu et al., 2021) and PipeTransformer (He et al., ICML'21) choose the
// number from the training's state instead, but all freeze a prefix too, so the costs below hold
// for them.

#include <cstdint>
#include <memory>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/freezing/options.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"

namespace dynmo::dynamism {

// Step at which each block freezes under kPlasticity and kNorm, never falling with depth; `steps`
// where it does not. A function of (parameters, seed). Requires valid parameters.
[[nodiscard]] std::vector<std::int64_t> freezing_steps(const FreezingOptions& options, int blocks,
                                                       std::int64_t steps, std::uint64_t seed);

// The embedding freezes with the first block (not under kRandom, so that nothing is a prefix); a
// head tied to it goes on training its own copy. The head never freezes. kBadInput naming the
// field.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_freezing(const FreezingOptions& options,
                                                                 const LoadInputs& inputs);

}  // namespace dynmo::dynamism
