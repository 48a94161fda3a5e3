// SPDX-License-Identifier: Apache-2.0
#pragma once

// Matrices that have lost weights, in one of two formats that give the same training. Masked
// tensors keep their shape and hold zeros for removed weights. Compressed tensors hold only the
// kept weights, so products, update and memory shrink.
//
// Compressed takes 28 bytes for each kept weight (value, gradient, two moments, 12 of the pattern).
// Masked takes 16 bytes for each weight of the matrix. On a device all are masked: sparse products
// of single weights are slower there than dense ones.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "dynmo/core/units.h"
#include "dynmo/model/layer.h"

namespace dynmo::kernels {
struct MatrixSize;  // sparse_break_even.h
}

namespace dynmo::model {

enum class MatrixFormat { kMasked, kCompressed };

[[nodiscard]] inline bool is_compressed(const Parameter& parameter) {
  return parameter.mask.defined() && !parameter.by_units && parameter.value.dim() == 1;
}
// Returns whether the tensors hold the kept weights alone, by offset.
[[nodiscard]] inline bool holds_kept_only(const Parameter& parameter) {
  return parameter.by_units || is_compressed(parameter);
}

// Returns the bytes of a mask in host memory.
[[nodiscard]] std::span<const std::uint8_t> mask_bits(const at::Tensor& mask);
// Returns the number of weights that a mask keeps. Waits for a mask on a device.
[[nodiscard]] std::int64_t kept_weights(const at::Tensor& mask);
// Returns the offsets of the kept weights of a matrix, ascending. Requires a mask of `weights`
// weights. Waits for a mask on a device.
[[nodiscard]] std::vector<std::int32_t> kept_offsets(const at::Tensor& mask, std::int64_t weights);

// Returns the kept weights of a parameter by offset: a copy, or the value itself.
[[nodiscard]] at::Tensor kept_values(const Parameter& parameter);
// Returns the value in the matrix's shape, with zeros for removed weights: a copy, or the value
// itself.
[[nodiscard]] at::Tensor dense_value(const Parameter& parameter, at::IntArrayRef shape);

// Removes weights from a matrix of `spec`, and their moments. `stay` has ascending positions among
// its present weights. These remain, in `format`. Call it between two steps, when gradients are
// zero, and call derive() of the layer afterwards.
void prune(Parameter& parameter, const ParameterSpec& spec, std::span<const std::int32_t> stay,
           MatrixFormat format);

// Converts a compressed matrix to a masked one. Requires its pattern.
void decompress(Parameter& parameter);

// Removes from the gradients what belongs to removed weights. Call it before a norm of them is
// computed. Does nothing for compressed matrices, which have no such gradients. Does not wait for a
// device.
void mask_gradients(LayerState& state);

// Returns the sizes of all matrices that may be compressed: those of layers that compute in fp32.
[[nodiscard]] std::vector<kernels::MatrixSize> compressible_matrices(const Model& model);

// Returns the bytes of a pattern of `kept` weights of a matrix [rows, columns].
[[nodiscard]] Bytes pattern_bytes(std::int64_t kept, std::int64_t rows, std::int64_t columns);

}  // namespace dynmo::model
