// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/pruned.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstddef>
#include <map>
#include <numeric>

#include "dynmo/core/bit_mask.h"
#include "dynmo/core/check.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/kernels/sparse_break_even.h"
#include "dynmo/kernels/sparse_products.h"

namespace dynmo::model {
namespace {

at::Tensor index_of(std::span<const std::int32_t> offsets) {
  at::Tensor index = at::empty({static_cast<std::int64_t>(offsets.size())}, at::kInt);
  std::ranges::copy(offsets, kernels::host_data<std::int32_t>(index));
  return index;
}

at::Tensor mask_of(std::span<const std::int32_t> offsets, std::int64_t weights) {
  const std::vector<std::uint8_t> bits = pack_mask(offsets, weights);
  at::Tensor mask = at::empty({static_cast<std::int64_t>(bits.size())}, at::kByte);
  std::ranges::copy(bits, kernels::host_data<std::uint8_t>(mask));
  return mask;
}

// Returns a tensor of `shape` with the kept weights in their places, and zeros elsewhere.
at::Tensor in_places(const at::Tensor& kept, const at::Tensor& mask, at::IntArrayRef shape) {
  at::Tensor dense = at::zeros(shape, kept.options());
  const at::Tensor places = index_of(kept_offsets(mask, dense.numel())).to(at::kLong);
  dense.view({-1}).index_copy_(0, places.to(kept.device()), kept);
  return dense;
}

// Sets the elements of removed weights to 0, on a device.
void clear_removed(at::Tensor& tensor, const at::Tensor& mask) {
  const at::Tensor bit_8 = at::arange(8, mask.options());
  const at::Tensor bits =
      mask.unsqueeze(1).bitwise_right_shift(bit_8).bitwise_and_(1).flatten().narrow(0, 0,
                                                                                    tensor.numel());
  tensor.view({-1}).masked_fill_(bits.eq(0), 0);
}

}  // namespace

std::span<const std::uint8_t> mask_bits(const at::Tensor& mask) {
  return {kernels::host_data<const std::uint8_t>(mask), static_cast<std::size_t>(mask.numel())};
}

std::int64_t kept_weights(const at::Tensor& mask) { return count_bits(mask_bits(mask.cpu())); }

std::vector<std::int32_t> kept_offsets(const at::Tensor& mask, std::int64_t weights) {
  auto offsets = unpack_mask(mask_bits(mask.cpu()), weights);
  DYNMO_CHECK(offsets.has_value(), "a mask of {} weights, got: {}", weights,
              offsets.error().message);
  return *std::move(offsets);
}

at::Tensor kept_values(const Parameter& parameter) {
  if (!parameter.mask.defined()) return parameter.value.view({-1});
  if (holds_kept_only(parameter)) return parameter.value.view({-1});
  const at::Tensor places = index_of(kept_offsets(parameter.mask, parameter.value.numel()));
  return parameter.value.view({-1}).index_select(0, places.to(parameter.value.device()));
}

at::Tensor dense_value(const Parameter& parameter, at::IntArrayRef shape) {
  if (!holds_kept_only(parameter)) return parameter.value;
  return in_places(parameter.value.view({-1}), parameter.mask, shape);
}

void prune(Parameter& parameter, const ParameterSpec& spec, std::span<const std::int32_t> stay,
           MatrixFormat format) {
  const at::NoGradGuard no_graph;
  DYNMO_CHECK(spec.prunable && spec.shape.size() == 2, "a matrix that may be pruned, got {}",
              spec.name);
  DYNMO_CHECK(format == MatrixFormat::kCompressed || !is_compressed(parameter),
              "{} to stay compressed", spec.name);
  DYNMO_CHECK(!parameter.by_units, "{} to lose single weights, not units", spec.name);
  const std::int64_t weights = spec.shape[0] * spec.shape[1];
  const bool compressed = is_compressed(parameter);
  std::vector<std::int32_t> had;
  if (parameter.mask.defined()) {
    had = kept_offsets(parameter.mask, weights);
  } else {
    had.resize(static_cast<std::size_t>(weights));
    std::iota(had.begin(), had.end(), 0);
  }
  std::vector<std::int32_t> offsets;
  offsets.reserve(stay.size());
  for (const std::int32_t place : stay) offsets.push_back(had[static_cast<std::size_t>(place)]);
  const at::Device device = parameter.value.device();
  DYNMO_CHECK(device.is_cpu() || format == MatrixFormat::kMasked, "{} to be masked on {}",
              spec.name, device.str());
  parameter.mask = mask_of(offsets, weights).to(device);
  const at::Tensor from =
      device.is_cpu() ? index_of(compressed ? stay : offsets) : at::Tensor();  // only on the CPU
  for (at::Tensor* tensor : {&parameter.value, &parameter.first_moment, &parameter.second_moment}) {
    if (!tensor->defined()) continue;
    if (!device.is_cpu()) {
      clear_removed(*tensor, parameter.mask);
      continue;
    }
    at::Tensor kept = tensor->view({-1}).index_select(0, from);
    if (format == MatrixFormat::kCompressed) {
      *tensor = std::move(kept);
    } else {
      tensor->zero_();
      tensor->view({-1}).index_copy_(0, from.to(at::kLong), kept);
    }
  }
  if (parameter.gradient.defined()) parameter.gradient = at::zeros_like(parameter.value);
}

void decompress(Parameter& parameter) {
  DYNMO_CHECK(is_compressed(parameter) && parameter.pattern, "{} compressed, with its pattern",
              parameter.name);
  const std::vector<std::int64_t> shape = {parameter.pattern->rows(), parameter.pattern->columns()};
  for (at::Tensor* tensor :
       {&parameter.value, &parameter.gradient, &parameter.first_moment, &parameter.second_moment}) {
    if (tensor->defined()) *tensor = in_places(*tensor, parameter.mask, shape);
  }
  parameter.pattern.reset();
  parameter.segments = 0;
}

void mask_gradients(LayerState& state) {
  for (Parameter& parameter : state.parameters) {
    if (!parameter.mask.defined() || !parameter.gradient.defined() || holds_kept_only(parameter)) {
      continue;
    }
    if (!parameter.gradient.is_cpu()) {
      clear_removed(parameter.gradient, parameter.mask);
      continue;
    }
    const auto clear = [&](auto* gradient) {
      const std::span<const std::uint8_t> bits = mask_bits(parameter.mask);
      for (std::int64_t i = 0; i < parameter.gradient.numel(); ++i) {
        const std::uint8_t byte = bits[static_cast<std::size_t>(i / 8)];
        if ((byte >> (i % 8) & 1) == 0) gradient[i] = 0;
      }
    };
    if (parameter.gradient.scalar_type() == at::kDouble) {
      clear(kernels::host_data<double>(parameter.gradient));
    } else {
      clear(kernels::host_data<float>(parameter.gradient));
    }
  }
}

std::vector<kernels::MatrixSize> compressible_matrices(const Model& model) {
  std::map<std::vector<std::int64_t>, int> sizes;
  for (const auto& layer : model) {
    if (layer->compute_type() != at::kFloat) continue;
    for (const ParameterSpec& spec : layer->parameters()) {
      if (spec.prunable) ++sizes[spec.shape];
    }
  }
  std::vector<kernels::MatrixSize> matrices;
  for (const auto& [shape, count] : sizes) {
    matrices.push_back({.rows = shape[0], .columns = shape[1], .matrices = count});
  }
  return matrices;
}

Bytes pattern_bytes(std::int64_t kept, std::int64_t rows, std::int64_t columns) {
  return Bytes{12 * kept + 4 * (rows + columns + 2)};
}

}  // namespace dynmo::model
