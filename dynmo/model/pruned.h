// SPDX-License-Identifier: Apache-2.0
#pragma once

// Matrices that have lost weights. Two formats give the same training: masked, where the tensors
// keep their shape and hold zeros where a weight is gone, and compressed, where they hold the kept
// weights alone, so that products, update and memory shrink. Compressed takes 28 bytes a kept
// weight (value, gradient, two moments, 12 of the pattern), masked 16 a weight of the matrix.

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
  return parameter.mask.defined() && parameter.value.dim() == 1;
}

// The bytes of a mask.
[[nodiscard]] std::span<const std::uint8_t> mask_bits(const at::Tensor& mask);
// How many weights a mask keeps.
[[nodiscard]] std::int64_t kept_weights(const at::Tensor& mask);
// Offsets of the kept weights of a matrix, ascending. Requires a mask of so many weights.
[[nodiscard]] std::vector<std::int32_t> kept_offsets(const at::Tensor& mask, std::int64_t weights);

// The kept weights of a parameter by offset: a copy, or the value itself.
[[nodiscard]] at::Tensor kept_values(const Parameter& parameter);
// The value in the matrix's shape, with zeros where a weight is gone: a copy, or the value itself.
[[nodiscard]] at::Tensor dense_value(const Parameter& parameter, at::IntArrayRef shape);

// Takes weights from a matrix of `spec`: of those that it has, the ones at the ascending positions
// `stay` are left, in `format`. The moments of the others go too. Due between two steps: gradients
// are zero. The layer's derive() is due afterwards.
void prune(Parameter& parameter, const ParameterSpec& spec, std::span<const std::int32_t> stay,
           MatrixFormat format);

// Takes out of the gradients what belongs to weights that are gone, before anybody takes a norm of
// them. Nothing for compressed matrices, which have none.
void mask_gradients(LayerState& state);

// The sizes of all matrices that may be compressed: those of layers that compute in fp32.
[[nodiscard]] std::vector<kernels::MatrixSize> compressible_matrices(const Model& model);

// Returns the bytes of a pattern of so many kept weights of a matrix [rows, columns].
[[nodiscard]] Bytes pattern_bytes(std::int64_t kept, std::int64_t rows, std::int64_t columns);

}  // namespace dynmo::model
