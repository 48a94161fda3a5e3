// SPDX-License-Identifier: Apache-2.0
#pragma once

// Loops of AdamW over a tensor's elements. One thread; all instruction sets give the same bits.

#include <cstdint>
#include <span>

#include "dynmo/kernels/device/adamw_factors.h"

namespace dynmo::kernels {

struct AdamWElements {
  float* value = nullptr;
  float* gradient = nullptr;
  float* first_moment = nullptr;
  float* second_moment = nullptr;
  std::uint16_t* rounded = nullptr;  // the values in bf16, or null
};

// Updates elements by one step of AdamW, and zeroes their gradients, in one pass over memory.
void update(const AdamWElements& elements, std::int64_t count, const device::AdamWFactors& factors);

// Returns the sum of the squares in fp64, in one fixed order.
[[nodiscard]] double sum_of_squares(std::span<const float> values);
[[nodiscard]] double sum_of_squares(std::span<const double> values);

}  // namespace dynmo::kernels
