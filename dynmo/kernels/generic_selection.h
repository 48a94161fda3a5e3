// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention within buckets of queries as compositions of libtorch's, for devices (generic.h). They
// run on any device, so tests compare them with the kernels on the CPU.
//
// The rows of a bucket of a head are a section. Sections are padded to the length of the longest
// one, and causal_attention() of a device works on all of them. Padding lies behind all rows of its
// section, so no row sees it. Time and memory are those of the longest section times the number of
// sections.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "dynmo/kernels/operations.h"
#include "dynmo/kernels/selected_attention.h"

namespace dynmo::kernels::generic {

// Like angular_hashes() of angular_hashes.h, except for the order of sums. Requires both tensors on
// one device. Does not wait for it.
[[nodiscard]] at::Tensor angular_hashes(const at::Tensor& x_BTHK, const at::Tensor& directions_HKS);

// Returns the selection of a token's own head and bucket, without the token itself, in its padded
// form. Buckets are int32, from 0 to buckets - 1. Waits once for the device, for the longest
// section and the number of pairs.
[[nodiscard]] Selection select_buckets(const at::Tensor& bucket_BHT, std::int64_t buckets);

// Like selected_attention() and its gradient of selected_attention.h, on a padded selection. The
// queries with norm 1 serve as keys. Nothing waits for the device.
[[nodiscard]] Attention selected_attention(const at::Tensor& q_BTHK, const at::Tensor& v_BTGK,
                                           const Selection& selection);
[[nodiscard]] AttentionGradient selected_attention_gradient(const at::Tensor& gradient_BTHK,
                                                            const at::Tensor& q_BTHK,
                                                            const at::Tensor& v_BTGK,
                                                            const Attention& attention,
                                                            const Selection& selection);

}  // namespace dynmo::kernels::generic
