// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/emulated/layer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/emulated/device.h"
#include "dynmo/model/output_shape.h"

namespace dynmo::model {
namespace {

// Costs by step, computed once for all layers and ranks of a process.
class CostTable {
 public:
  explicit CostTable(std::function<cost::ModelCost(std::int64_t)> costs)
      : costs_(std::move(costs)) {}

  cost::LayerCost at(std::int64_t step, LayerId layer) {
    const std::lock_guard lock(mutex_);
    auto found = steps_.find(step);
    if (found == steps_.end()) {
      if (steps_.size() > 8) steps_.clear();  // ranks are a step apart at most
      found = steps_.emplace(step, costs_(step)).first;
    }
    return found->second.layers[layer.index()];
  }

 private:
  std::function<cost::ModelCost(std::int64_t)> costs_;
  std::mutex mutex_;
  std::map<std::int64_t, cost::ModelCost> steps_;
};

std::vector<std::int64_t> floats_of(Bytes bytes) {
  return {std::max<std::int64_t>(1, bytes.value / static_cast<std::int64_t>(sizeof(float)))};
}

struct EmulatedStash : Stash {
  cost::LayerCost cost;
  at::Tensor input;
};

void work(double seconds) {
  EmulatedDevice own;
  EmulatedDevice* const device = EmulatedDevice::in_use();
  (device != nullptr ? *device : own).work(seconds);
}

class EmulatedLayer final : public Layer, public SizesOutput {
 public:
  EmulatedLayer(std::shared_ptr<CostTable> costs, const cost::LayerCost& first, LayerId id,
                bool head, const EmulatedOptions& options)
      : costs_(std::move(costs)),
        name_(first.name),
        id_(id),
        head_(head),
        floats_(std::max<std::int64_t>(
            1, std::llround(static_cast<double>(first.parameter_bytes.value) *
                            options.memory_scale / sizeof(float)))) {}

  std::string name() const override { return name_; }
  std::vector<ParameterSpec> parameters() const override {
    return {
        {.name = "weight", .shape = {floats_}, .init_std = 0, .mean = 0, .weight_decay = false}};
  }

  Needs needs() const override { return {.targets = false, .loss = head_}; }

  std::vector<std::int64_t> output_shape(std::int64_t step) const override {
    if (head_) return {};
    return floats_of(costs_->at(step, id_).boundary_bytes);
  }

  Output forward(const LayerState&, const Hidden& input, const LayerContext& context,
                 std::unique_ptr<Stash>* stash) const override {
    cost::LayerCost cost = costs_->at(context.step, id_);
    Output output;
    (head_ ? output.loss : output.hidden.x) =
        head_ ? at::zeros({}, at::kFloat) : at::empty(floats_of(cost.boundary_bytes), at::kFloat);
    const double seconds = cost.forward_s;
    if (stash != nullptr) {
      auto saved = std::make_unique<EmulatedStash>();
      saved->cost = std::move(cost);
      saved->input = input.x;
      *stash = std::move(saved);
    }
    work(seconds);
    return output;
  }

  at::Tensor input_gradient(const LayerState&, Stash& stash, const at::Tensor&,
                            InputGradient wanted) const override {
    const auto& saved = dynamic_cast<EmulatedStash&>(stash);
    at::Tensor gradient;
    if (wanted == InputGradient::kWanted && saved.input.defined()) {
      gradient = at::empty_like(saved.input);
    }
    work(saved.cost.backward_input_s);
    return gradient;
  }

  void weight_gradient(LayerState& state, Stash& stash) const override {
    if (state.frozen) return;
    work(dynamic_cast<EmulatedStash&>(stash).cost.backward_weight_s);
  }

 private:
  std::shared_ptr<CostTable> costs_;
  std::string name_;
  LayerId id_;
  bool head_;
  std::int64_t floats_;
};

}  // namespace

std::vector<std::int64_t> emulated_boundary(const cost::ModelCost& costs) {
  Bytes most;
  for (const cost::LayerCost& layer : costs.layers) most = std::max(most, layer.boundary_bytes);
  return floats_of(most);
}

Expected<Model> make_emulated(EmulatedOptions options) {
  const cost::ModelCost first = options.costs(0);
  DYNMO_TRY(cost::validate(first));
  if (!(options.memory_scale > 0 && options.memory_scale <= 1)) {
    return make_error(ErrorCode::kBadInput, "memory_scale is {}, wanted above 0 and at most 1",
                      options.memory_scale);
  }
  const auto costs = std::make_shared<CostTable>(options.costs);
  Model model;
  for (std::size_t i = 0; i < first.layers.size(); ++i) {
    model.push_back(std::make_shared<EmulatedLayer>(
        costs, first.layers[i], LayerId(static_cast<std::int32_t>(i)),
        /*head=*/i + 1 == first.layers.size(), options));
  }
  return model;
}

}  // namespace dynmo::model
