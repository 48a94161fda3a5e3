// SPDX-License-Identifier: Apache-2.0
#pragma once

// Parameters that two layers share.

#include <optional>
#include <string>

#include "dynmo/core/ids.h"
#include "dynmo/cost/decoder_shape.h"

namespace dynmo::model {

// Two parameters that are one, such as the matrices of embedding and head. Each layer has its own
// copy of value and moments, and its own gradient. Both gradients are added once at the end of a
// step. So equal updates keep the copies equal, bit for bit, on any ranks. The initial value is
// that of `first`.
struct Tie {
  LayerId first;
  std::string first_parameter;  // ParameterSpec::name
  LayerId second;
  std::string second_parameter;
  std::optional<cost::HeadRows> rows =
      {};  // rows of `first` that are `second`; without a value, all
};

}  // namespace dynmo::model
