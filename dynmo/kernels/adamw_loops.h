// SPDX-License-Identifier: Apache-2.0
#pragma once

// Loops of AdamW over a tensor's elements. One thread; all instruction sets give the same bits.

#include <cstdint>
#include <span>

namespace dynmo::kernels {

// Constants of one step of AdamW, the same for all elements of a tensor. Must be laid out as struct
// AdamW of device/kernels.cu.
struct AdamWFactors {
  float gradient = 1;     // factor of clipping
  float first = 0;        // 1 - beta1
  float second = 0;       // 1 - beta2
  float second_kept = 0;  // beta2
  float rate = 0;         // -learning rate / (1 - beta1^step)
  float deviation = 1;    // sqrt(1 - beta2^step)
  float epsilon = 0;
  float kept = 1;  // 1 - learning rate * weight decay
};

struct AdamWElements {
  float* value = nullptr;
  float* gradient = nullptr;
  float* first_moment = nullptr;
  float* second_moment = nullptr;
  std::uint16_t* rounded = nullptr;  // the values in bf16, or null
};

// Updates elements by one step of AdamW, and zeroes their gradients, in one pass over memory.
void update(const AdamWElements& elements, std::int64_t count, const AdamWFactors& factors);

// Returns the sum of the squares in fp64, in one fixed order.
[[nodiscard]] double sum_of_squares(std::span<const float> values);
[[nodiscard]] double sum_of_squares(std::span<const double> values);

}  // namespace dynmo::kernels
