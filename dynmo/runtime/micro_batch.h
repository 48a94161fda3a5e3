// SPDX-License-Identifier: Apache-2.0
#pragma once

// The inputs of a pipeline.

#include <ATen/core/Tensor.h>

namespace dynmo::runtime {

// Inputs and next-token targets of one micro-batch, int64, B sequences of T tokens.
struct MicroBatch {
  at::Tensor tokens_BT;
  at::Tensor targets_BT;
};

}  // namespace dynmo::runtime
