// SPDX-License-Identifier: Apache-2.0
#pragma once

// The emulated model of a config (run.device = "emulated"): which costs its layers sleep for.

#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/model/layer.h"
#include "dynmo/train/config.h"

namespace dynmo::train {

struct EmulatedModel {
  model::Model layers;
  std::vector<std::int64_t> boundary_shape;
};

// kBadInput: the profile or trace cannot be read or is none (file and place are named).
[[nodiscard]] Expected<EmulatedModel> emulated_model(const Config& config);

}  // namespace dynmo::train
