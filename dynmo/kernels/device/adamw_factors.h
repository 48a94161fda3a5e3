// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dynmo::kernels::device {

// Constants of one step of AdamW, the same for all elements of a tensor. Must be laid out as struct
// AdamW of kernels.cu.
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

}  // namespace dynmo::kernels::device
