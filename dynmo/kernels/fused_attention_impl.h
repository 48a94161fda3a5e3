// SPDX-License-Identifier: Apache-2.0
#pragma once

// The fused operation that libtorch chooses for attention on a device.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dynmo::kernels::generic {

// The answers of at::_fused_sdp_choice (sdp::SDPBackend of the library).
enum class Fused : std::int64_t { kNone = 0, kFlash = 1, kEfficient = 2 };

// Returns the choice by type, shape and device. Requires a device that has such operations.
[[nodiscard]] Fused fused_choice(const at::Tensor& q_BHTK, const at::Tensor& k_BHTK,
                                 const at::Tensor& v_BHTK);

}  // namespace dynmo::kernels::generic
