// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/train/setup/run_model.h"

namespace dynmo::train {

// Makes the model of run.device = "emulated", whose layers sleep for given costs. With `dense`, all
// steps have the costs of the trace's first step. Returns kBadInput with file and place if the
// profile or trace cannot be read.
[[nodiscard]] Expected<RunModel> emulated_model(const config::Config& config, bool dense);

}  // namespace dynmo::train
