// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/freezing/training/reference.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/forwarding_layer.h"
#include "dynmo/model/pruned.h"

namespace dynmo::dynamism {
namespace {

constexpr double kLargest = 127;

std::string copy_name(const std::string& parameter) { return parameter + ".reference"; }
std::string scales_name(const std::string& parameter) { return parameter + ".reference_scales"; }

bool by_rows(const model::ParameterSpec& spec) { return spec.shape.size() == 2; }

class LayerWithReference final : public model::ForwardingLayer {
 public:
  using ForwardingLayer::ForwardingLayer;

  std::vector<model::BufferSpec> buffers() const override {
    std::vector<model::BufferSpec> all = inner().buffers();
    for (const model::ParameterSpec& spec : inner().parameters()) {
      all.push_back({.name = copy_name(spec.name),
                     .shape = spec.shape,
                     .type = by_rows(spec) ? at::kChar : at::kFloat});
      if (by_rows(spec)) all.push_back({.name = scales_name(spec.name), .shape = {spec.shape[0]}});
    }
    return all;
  }
};

const at::Tensor& buffer(const model::LayerState& state, const std::string& name) {
  const auto found = std::ranges::find(state.buffers, name, &model::Buffer::name);
  DYNMO_CHECK(found != state.buffers.end(), "buffer '{}' of layer {}", name, state.id);
  return found->value;
}

}  // namespace

QuantizedRows quantize_rows(const at::Tensor& matrix) {
  const at::Tensor wide = matrix.to(at::kFloat);
  const at::Tensor scales = at::amax(wide.abs(), /*dim=*/1) / kLargest;
  // A row of zeros stays zero.
  const at::Tensor divisors = at::where(scales > 0, scales, at::ones_like(scales)).unsqueeze(1);
  return {(wide / divisors).round_().clamp_(-kLargest, kLargest).to(at::kChar), scales};
}

at::Tensor dequantize_rows(const QuantizedRows& rows) {
  return rows.values.to(at::kFloat).mul_(rows.scales.unsqueeze(1));
}

std::shared_ptr<const model::Layer> with_reference(std::shared_ptr<const model::Layer> layer) {
  return std::make_shared<LayerWithReference>(std::move(layer));
}

bool has_reference(const model::Layer& layer) {
  const std::vector<model::BufferSpec> buffers = layer.buffers();
  return std::ranges::all_of(layer.parameters(), [&](const model::ParameterSpec& spec) {
    return std::ranges::count(buffers, copy_name(spec.name), &model::BufferSpec::name) == 1;
  });
}

void take_reference(const model::Layer& layer, model::LayerState& state) {
  const at::NoGradGuard no_graph;
  const std::vector<model::ParameterSpec> specs = layer.parameters();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const model::ParameterSpec& spec = specs[i];
    const at::Tensor value = model::dense_value(state.parameters[i], spec.shape);
    const at::Tensor& copy = buffer(state, copy_name(spec.name));
    if (!by_rows(spec)) {
      copy.copy_(value);
      continue;
    }
    const QuantizedRows rows = quantize_rows(value);
    copy.copy_(rows.values);
    buffer(state, scales_name(spec.name)).copy_(rows.scales);
  }
}

model::LayerState reference_of(const model::Layer& layer, const model::LayerState& state) {
  const at::NoGradGuard no_graph;
  model::LayerState reference;
  reference.id = state.id;
  reference.random_key = state.random_key;
  reference.frozen = true;
  reference.buffers = state.buffers;
  for (const model::ParameterSpec& spec : layer.parameters()) {
    const at::Tensor& copy = buffer(state, copy_name(spec.name));
    model::Parameter parameter;
    parameter.name = spec.name;
    parameter.value =
        by_rows(spec) ? dequantize_rows({copy, buffer(state, scales_name(spec.name))}) : copy;
    reference.parameters.push_back(std::move(parameter));
  }
  model::derive(layer, reference);
  return reference;
}

}  // namespace dynmo::dynamism
