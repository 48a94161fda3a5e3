// SPDX-License-Identifier: Apache-2.0
#pragma once

// The results of an exit's head in the memory of a device, for which the host does not wait. The
// functions are composed of libtorch's operations and run on any device.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dynmo::dynamism {

// The head's result for its rows, with the legend of exit_layer.cpp.
struct ScoresOnDevice {
  at::Tensor probabilities_MV;  // of accumulation_type
  at::Tensor gap_M;             // of the two largest
  at::Tensor right_M;           // bool
  at::Tensor loss_M;            // -log of the target's, fp64
};
[[nodiscard]] ScoresOnDevice scores_on_device(const at::Tensor& scores_MV,
                                              const at::Tensor& targets_M);

// Rows by whether they leave, ascending.
struct RowsByLeaving {
  at::Tensor stay;
  at::Tensor left;
};
// Divides rows by whether their confidence is at least `threshold`. Waits once, as their numbers
// are the shapes of later tensors.
[[nodiscard]] RowsByLeaving divide_by(const at::Tensor& confidence_N, double threshold);

// Returns the figures from kExitLoss on, fp64. `scores` may be of no rows, and `confidence_N`
// undefined.
[[nodiscard]] at::Tensor figures_on_device(const ScoresOnDevice& scores,
                                           const at::Tensor& confidence_N, at::Device device);

}  // namespace dynmo::dynamism
