// SPDX-License-Identifier: Apache-2.0
#pragma once

// Every access to a tensor's elements in host memory goes through this file. The memory of a device
// has addresses, too, and libtorch hands them out unchecked.

#include <ATen/core/Tensor.h>

#include <type_traits>

#include "dynmo/core/check.h"

namespace dynmo::kernels {

// Returns the first element of a tensor in host memory. `Element` is const for reading. Throws
// CheckFailure for a tensor of a device.
template <typename Element>
[[nodiscard]] Element* host_data(const at::Tensor& tensor) {
  DYNMO_CHECK(tensor.is_cpu(), "a tensor in host memory, got one on {}", tensor.device().str());
  if constexpr (std::is_const_v<Element>) {
    return tensor.const_data_ptr<std::remove_const_t<Element>>();
  } else {
    return tensor.mutable_data_ptr<Element>();
  }
}

}  // namespace dynmo::kernels
