// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/load_tensor.h"

#include <cstdint>
#include <initializer_list>

#include "dynmo/core/check.h"

namespace dynmo::dynamism {
namespace {

// Adds an entry unless its value is 0.
void add(tensor::SparseTensor& tensor, std::initializer_list<std::size_t> place, double value) {
  if (value == 0) return;
  std::size_t mode = 0;
  for (const std::size_t index : place) {
    tensor.indices[mode++].push_back(static_cast<std::uint32_t>(index));
  }
  tensor.values.push_back(value);
}

}  // namespace

tensor::SparseTensor tensor_of(const LoadModel& recorded) {
  const std::vector<std::int64_t> steps = recorded.recorded_steps();
  DYNMO_CHECK(!steps.empty(), "a load that was recorded");
  tensor::SparseTensor tensor{.sizes = {steps.size(), recorded.at(steps.front()).layers.size()},
                              .names = {"step", "layer"},
                              .indices = {{}, {}}};
  for (std::size_t step = 0; step < steps.size(); ++step) {
    const cost::ModelCost model = recorded.at(steps[step]);
    for (std::size_t layer = 0; layer < model.layers.size(); ++layer) {
      const cost::LayerCost& cost = model.layers[layer];
      const double backward = cost.frozen ? 0 : cost.backward_input_s + cost.backward_weight_s;
      add(tensor, {step, layer}, cost.forward_s + backward);
    }
  }
  return tensor;
}

tensor::SparseTensor tensor_of(const RecordedCounts& counts) {
  DYNMO_CHECK(!counts.steps.empty(), "counts of a step");
  tensor::SparseTensor tensor{.sizes = {counts.steps.size(), counts.steps.begin()->second.size(),
                                        static_cast<std::uint64_t>(counts.experts)},
                              .names = {"step", "block", "expert"},
                              .indices = {{}, {}, {}}};
  std::size_t step = 0;
  for (const auto& [number, blocks] : counts.steps) {
    for (std::size_t block = 0; block < blocks.size(); ++block) {
      for (std::size_t expert = 0; expert < blocks[block].size(); ++expert) {
        add(tensor, {step, block, expert}, blocks[block][expert]);
      }
    }
    ++step;
  }
  return tensor;
}

}  // namespace dynmo::dynamism
