// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention within buckets of queries, composed of libtorch's operations, for devices (generic.h).
// The functions run on any device, so tests compare them with the kernels on the CPU.
//
// The rows of a bucket of a head are a section, in one of two forms:
//
// - Packed: sections lie one behind the other, and libtorch's fused attention reads on the device
//   where each begins. Nothing waits. Time is that of the sections' pairs.
// - Padded: sections have the length of the longest one, and causal_attention() of a device works
//   on all of them. Padding lies behind all rows of its section, so no row sees it. Time and memory
//   are those of the longest section times the number of sections.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "dynmo/kernels/operations.h"
#include "dynmo/kernels/selected_attention.h"

namespace dynmo::kernels::generic {

// Like angular_hashes() of angular_hashes.h, except for the order of sums. Requires both tensors on
// one device. Does not wait for it.
[[nodiscard]] at::Tensor angular_hashes(const at::Tensor& x_BTHK, const at::Tensor& directions_HKS);

// Returns whether queries of this type and shape can be packed. Then libtorch chooses a fused
// operation that takes sections: at::_flash_attention_forward or at::_efficient_attention_forward.
// CUDA has both, the CPU none. They take heads of a multiple of 8 elements, up to 128, and at most
// 65,535 sections. Flash takes bf16 and fp16, the other one fp32, too.
[[nodiscard]] bool can_pack(const at::Tensor& q_BTHK, std::int64_t buckets);

// Returns the selection in which a token sees the earlier tokens of its head and bucket, in the
// packed form. Buckets are int32, from 0 to buckets - 1.
[[nodiscard]] Selection pack_buckets(const at::Tensor& bucket_BHT, std::int64_t buckets);

// Like pack_buckets(), in the padded form. Waits once for the device, to read the length of the
// longest section. The only bound on that length is T. With it, attention would cost S times dense
// attention.
[[nodiscard]] Selection select_buckets(const at::Tensor& bucket_BHT, std::int64_t buckets);

// Like selected_attention() and its gradient in selected_attention.h, for either form. The queries
// with norm 1 serve as keys. Nothing waits for the device.
[[nodiscard]] Attention selected_attention(const at::Tensor& q_BTHK, const at::Tensor& v_BTGK,
                                           const Selection& selection);
[[nodiscard]] AttentionGradient selected_attention_gradient(const at::Tensor& gradient_BTHK,
                                                            const at::Tensor& q_BTHK,
                                                            const at::Tensor& v_BTGK,
                                                            const Attention& attention,
                                                            const Selection& selection);

}  // namespace dynmo::kernels::generic
