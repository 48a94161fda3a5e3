// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/layer_cost.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::cost {
namespace {

double work_of(const LayerCost& layer, bool in_frozen_prefix, int micro_batches) {
  if (in_frozen_prefix) return layer.forward_s;
  if (layer.frozen) return layer.forward_s + layer.backward_input_s;
  return layer.forward_s + layer.backward_input_s + layer.backward_weight_s +
         layer.update_s / micro_batches;
}

Expected<void> validate(const LayerCost& layer, std::size_t index) {
  const std::array<std::pair<std::string_view, double>, 4> times = {{
      {"forward_s", layer.forward_s},
      {"backward_input_s", layer.backward_input_s},
      {"backward_weight_s", layer.backward_weight_s},
      {"update_s", layer.update_s},
  }};
  for (const auto& [field, seconds] : times) {
    if (!(seconds >= 0 && seconds <= kMaxSeconds)) {  // also refuses NaN
      return make_error(ErrorCode::kBadInput,
                        "layer {} ('{}'): {} is {}, wanted seconds from 0 to {}", index, layer.name,
                        field, seconds, kMaxSeconds);
    }
  }
  if (!(layer.product_time > 0 && layer.product_time <= 1)) {
    return make_error(ErrorCode::kBadInput,
                      "layer {} ('{}'): product_time is {}, wanted above 0, at most 1", index,
                      layer.name, layer.product_time);
  }
  const std::array<std::pair<std::string_view, Bytes>, 6> amounts = {{
      {"parameter_bytes", layer.parameter_bytes},
      {"gradient_bytes", layer.gradient_bytes},
      {"optimizer_bytes", layer.optimizer_bytes},
      {"copy_bytes", layer.copy_bytes},
      {"activation_bytes", layer.activation_bytes},
      {"boundary_bytes", layer.boundary_bytes},
  }};
  for (const auto& [field, bytes] : amounts) {
    // More than a pebibyte (2^50 bytes) in one layer is a wrong unit, and sums must not overflow.
    if (bytes < Bytes{0} || bytes > Bytes{std::int64_t{1} << 50}) {
      return make_error(ErrorCode::kBadInput,
                        "layer {} ('{}'): {} is {}, wanted bytes from 0 to 2^50", index, layer.name,
                        field, bytes.value);
    }
  }
  return {};
}

}  // namespace

int ModelCost::frozen_layers() const {
  const auto trained =
      std::find_if(layers.begin(), layers.end(), [](const LayerCost& c) { return !c.frozen; });
  return static_cast<int>(trained - layers.begin());
}

Expected<void> validate(const ModelCost& model) {
  if (model.layers.empty()) {
    return make_error(ErrorCode::kBadInput, "the model has no layers, wanted at least one");
  }
  for (std::size_t i = 0; i < model.layers.size(); ++i) DYNMO_TRY(validate(model.layers[i], i));
  return {};
}

Expected<void> validate(const ModelCost& model, int micro_batches) {
  DYNMO_TRY(validate(model));
  if (micro_batches < 1) {
    return make_error(ErrorCode::kBadInput, "{} micro-batches, wanted at least one", micro_batches);
  }
  double bytes = 0;
  for (const LayerCost& layer : model.layers) {
    bytes += static_cast<double>(state_bytes(layer).value) +
             static_cast<double>(layer.activation_bytes.value) * micro_batches;
  }
  if (bytes > 0x1p62) {
    return make_error(ErrorCode::kBadInput,
                      "the model and {} micro-batches take {:.3g} bytes, wanted at most 2^62",
                      micro_batches, bytes);
  }
  return {};
}

double work_s(const ModelCost& model, int layer, int micro_batches) {
  DYNMO_CHECK(layer >= 0 && layer < model.size(), "a layer below {}, got {}", model.size(), layer);
  DYNMO_CHECK(micro_batches >= 1, "at least 1 micro-batch, got {}", micro_batches);
  return work_of(model.layers[static_cast<std::size_t>(layer)], layer < model.frozen_layers(),
                 micro_batches);
}

std::vector<double> layer_work_s(const ModelCost& model, int micro_batches) {
  DYNMO_CHECK(micro_batches >= 1, "at least 1 micro-batch, got {}", micro_batches);
  const auto frozen = static_cast<std::size_t>(model.frozen_layers());
  std::vector<double> work(model.layers.size());
  for (std::size_t i = 0; i < work.size(); ++i) {
    work[i] = work_of(model.layers[i], i < frozen, micro_batches);
  }
  return work;
}

Bytes state_bytes(const LayerCost& layer) {
  if (layer.frozen) return layer.parameter_bytes + layer.copy_bytes;
  return layer.parameter_bytes + layer.copy_bytes + layer.gradient_bytes + layer.optimizer_bytes;
}

}  // namespace dynmo::cost
