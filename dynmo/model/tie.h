// SPDX-License-Identifier: Apache-2.0
#pragma once

// Parameters that two layers share.

#include <optional>
#include <string>

#include "dynmo/core/ids.h"
#include "dynmo/cost/decoder_shape.h"

namespace dynmo::model {

// Two parameters that are one, such as the matrices of embedding and head. Each layer has a copy
// of value and moments and a gradient of its own; the two gradients are added once at the end of a
// step, so that equal updates keep the copies equal, bit for bit, wherever the layers are.
// The initial value is the first's.
struct Tie {
  LayerId first;
  std::string first_parameter;  // ParameterSpec::name
  LayerId second;
  std::string second_parameter;
  std::optional<cost::HeadRows> rows = {};  // of the first that are the second; none: all
};

}  // namespace dynmo::model
