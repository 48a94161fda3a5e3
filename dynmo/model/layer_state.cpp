// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/layer_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <span>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/kernels/sparse_products.h"
#include "dynmo/model/forwarding_layer.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/pruned.h"
#include "dynmo/model/state_bytes.h"

namespace dynmo::model {
namespace {

// Streams of one layer: its parameters by index, and its run-time draws (dropout, routing noise).
constexpr std::uint64_t kParameterStream = 1;
constexpr std::uint64_t kRuntimeStream = 2;

// Fills in normal draws, four from each philox block (Box-Muller on 32-bit uniforms, at most 6.7
// stds). Element i depends on (key, i) alone. `values` begins with element `first`, a multiple of
// 4.
void fill_normal(std::span<float> values, std::uint64_t key, double mean, double init_std,
                 std::uint64_t first) {
  const auto uniform = [](std::uint32_t word) { return (word + 0.5) * 0x1p-32; };
  for (std::size_t i = 0; i < values.size(); i += 4) {
    const std::uint64_t block = (first + i) / 4;
    const auto words = philox(
        key, {static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), 0, 0});
    for (std::size_t j = 0; j < 4 && i + j < values.size(); j += 2) {
      const double radius = init_std * std::sqrt(-2.0 * std::log(uniform(words[j])));
      const double angle = 2.0 * std::numbers::pi * uniform(words[j + 1]);
      values[i + j] = static_cast<float>(mean + radius * std::cos(angle));
      if (i + j + 1 < values.size()) {
        values[i + j + 1] = static_cast<float>(mean + radius * std::sin(angle));
      }
    }
  }
}

void fill_initial(const ParameterSpec& spec, std::uint64_t key, at::Tensor& value) {
  if (spec.init_std == 0) {
    value.fill_(spec.mean);
    return;
  }
  const std::int64_t first = spec.piece ? spec.piece->first : 0;
  DYNMO_CHECK(first >= 0 && first % 4 == 0, "a piece that begins at a multiple of 4, got {}",
              first);
  fill_normal({value.data_ptr<float>(), static_cast<std::size_t>(value.numel())}, key, spec.mean,
              spec.init_std, static_cast<std::uint64_t>(first));
}

void allocate_training(Parameter& parameter) {
  parameter.gradient = at::zeros_like(parameter.value);
  parameter.first_moment = at::zeros_like(parameter.value);
  parameter.second_moment = at::zeros_like(parameter.value);
}

}  // namespace

LayerState make_state(const Layer& layer, LayerId id, std::uint64_t seed) {
  const auto number = static_cast<std::uint64_t>(id.value);
  LayerState state = allocate_like(layer, id, {});
  state.random_key = mix_key({seed, number, kRuntimeStream});
  const std::vector<ParameterSpec> specs = layer.parameters();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    Parameter& parameter = state.parameters[i];
    const ParameterSpec::Piece own = specs[i].piece.value_or(ParameterSpec::Piece{.parameter = i});
    fill_initial(specs[i],
                 mix_key({seed, number - static_cast<std::uint64_t>(own.layers_before),
                          kParameterStream, own.parameter}),
                 parameter.value);
    parameter.first_moment.zero_();
    parameter.second_moment.zero_();
  }
  const std::vector<BufferSpec> buffers = layer.buffers();
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    state.buffers[i].value.fill_(buffers[i].initial);
  }
  derive(layer, state);
  return state;
}

void derive(const Layer& layer, LayerState& state) {
  const std::vector<ParameterSpec> specs = layer.parameters();
  for (std::size_t i = 0; i < state.parameters.size(); ++i) {
    Parameter& parameter = state.parameters[i];
    if (layer.compute_type() != at::kFloat) {
      parameter.compute_copy = parameter.value.to(layer.compute_type());
    }
    if (is_compressed(parameter)) {
      parameter.pattern = kernels::sparse::make_pattern(
          specs[i].shape[0], specs[i].shape[1],
          kept_offsets(parameter.mask, specs[i].shape[0] * specs[i].shape[1]));
      parameter.segments = parameter.pattern->segments();
    }
  }
}

LayerState on_device(LayerState state, at::Device device) {
  for (Parameter& parameter : state.parameters) {
    if (!device.is_cpu() && is_compressed(parameter)) decompress(parameter);
    for (at::Tensor* tensor :
         {&parameter.value, &parameter.gradient, &parameter.first_moment, &parameter.second_moment,
          &parameter.compute_copy, &parameter.mask}) {
      if (tensor->defined()) *tensor = tensor->to(device);
    }
  }
  for (Buffer& buffer : state.buffers) {
    if (!buffer.on_host) buffer.value = buffer.value.to(device);
  }
  return state;
}

void freeze(LayerState& state) {
  state.frozen = true;
  for (Parameter& parameter : state.parameters) {
    parameter.gradient.reset();
    parameter.first_moment.reset();
    parameter.second_moment.reset();
  }
}

void unfreeze(LayerState& state) {
  if (!state.frozen) return;
  state.frozen = false;
  state.optimizer_steps = 0;
  for (Parameter& parameter : state.parameters) allocate_training(parameter);
}

// Adds `figures` and `later`. If there are later figures already, `figures` join them on the
// device, so the host does not wait.
void add_figures(Output& output, const std::vector<double>& figures, const at::Tensor& later) {
  if (!output.later_figures.defined()) {
    output.figures.insert(output.figures.end(), figures.begin(), figures.end());
    output.later_figures = later;
    return;
  }
  std::vector<at::Tensor> all = {output.later_figures};
  for (const double figure : figures) {
    all.push_back(at::full({1}, figure, output.later_figures.options()));
  }
  if (later.defined()) all.push_back(later);
  output.later_figures = at::cat(all);
}

bool drops_rows(const Model& model) {
  return std::ranges::any_of(model, [](const auto& layer) { return layer->needs().drops_rows; });
}

}  // namespace dynmo::model
