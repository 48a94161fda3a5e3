// SPDX-License-Identifier: Apache-2.0
#pragma once

// Layer freezing as a load model. Layers stop training from the front, one after another. A frozen
// prefix costs its forward pass only.
//
// The rule kSchedule is the ramp of MosaicML Composer's layer freezing. Egeria (Wang et al.,
// EuroSys'23), AutoFreeze (Liu et al., 2021) and PipeTransformer (He et al., ICML'21) use the
// training's state instead. All of them freeze a prefix too, so the costs below apply to them.

#include <cstdint>
#include <memory>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/freezing/options.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"

namespace dynmo::dynamism {

// Returns the step at which each block freezes under kPlasticity and kNorm, never falling with
// depth. It is `steps` if the block does not freeze. A function of (parameters, seed). Requires
// valid parameters.
[[nodiscard]] std::vector<std::int64_t> freezing_steps(const FreezingOptions& options, int blocks,
                                                       std::int64_t steps, std::uint64_t seed);

// Makes the load model. The embedding freezes with the first block, except under kRandom, where
// nothing is a prefix. A head tied to it continues to train its own copy. The head never freezes.
// Returns kBadInput with the field.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_freezing(const FreezingOptions& options,
                                                                 const LoadInputs& inputs);

}  // namespace dynmo::dynamism
