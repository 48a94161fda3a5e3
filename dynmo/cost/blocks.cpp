// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/blocks.h"

#include <algorithm>
#include <span>
#include <string>

namespace dynmo::cost {
namespace {

constexpr std::string_view kBlock = "blocks.";
constexpr std::string_view kHead = "head";

bool is_slice(std::string_view name) {
  return name.starts_with("head.") && name.find(" of ") != std::string_view::npos;
}

// Leaves out the passes that a frozen part does not run, in a block that is not frozen.
LayerCost part_of_trained(LayerCost part, bool in_frozen_prefix) {
  if (!part.frozen) return part;
  part.backward_weight_s = part.update_s = 0;
  part.gradient_bytes = part.optimizer_bytes = Bytes{0};
  if (in_frozen_prefix) {
    part.backward_input_s = 0;
    part.activation_bytes = Bytes{0};
  }
  return part;
}

void add(LayerCost& sum, const LayerCost& part) {
  sum.forward_s += part.forward_s;
  sum.backward_input_s += part.backward_input_s;
  sum.backward_weight_s += part.backward_weight_s;
  sum.update_s += part.update_s;
  sum.parameter_bytes += part.parameter_bytes;
  sum.gradient_bytes += part.gradient_bytes;
  sum.optimizer_bytes += part.optimizer_bytes;
  sum.copy_bytes += part.copy_bytes;
  sum.activation_bytes += part.activation_bytes;
  sum.boundary_bytes = part.boundary_bytes;
}

// Returns the sum of the parts. The first `frozen_prefix` of them are in the model's frozen prefix.
LayerCost joined(std::span<const LayerCost> parts, int frozen_prefix) {
  if (parts.size() == 1) return parts.front();
  const bool frozen = std::ranges::all_of(parts, &LayerCost::frozen);
  LayerCost sum;
  sum.name = module_of(parts.front().name);
  sum.frozen = frozen;
  double dense_s = 0;  // forward time before pruning
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const bool prefix = static_cast<int>(i) < frozen_prefix;
    add(sum, frozen ? parts[i] : part_of_trained(parts[i], prefix));
    dense_s += parts[i].forward_s / parts[i].product_time;
  }
  if (dense_s > 0) sum.product_time = std::min(1.0, sum.forward_s / dense_s);
  return sum;
}

}  // namespace

std::string_view module_of(std::string_view name) {
  if (is_slice(name)) return kHead;
  if (!is_block(name)) return name;
  return name.substr(0, name.find('.', kBlock.size()));
}

bool is_block(std::string_view name) { return name.starts_with(kBlock); }

int head_slices(const ModelCost& model) {
  const auto slices = std::ranges::count_if(
      model.layers, [](const LayerCost& layer) { return is_slice(layer.name); });
  return std::max(1, static_cast<int>(slices));
}

ModelCost joined_blocks(const ModelCost& model, HeadSlices slices) {
  const auto module = [&](const LayerCost& layer) {
    return slices == HeadSlices::kApart && is_slice(layer.name) ? std::string_view(layer.name)
                                                                : module_of(layer.name);
  };
  const int frozen = model.frozen_layers();
  ModelCost whole;
  for (auto first = model.layers.begin(); first != model.layers.end();) {
    const auto end = std::find_if(first, model.layers.end(), [&](const LayerCost& layer) {
      return module(layer) != module(*first);
    });
    const int before = static_cast<int>(first - model.layers.begin());
    whole.layers.push_back(joined({first, end}, frozen - before));
    // A block with one part loses the part's name too.
    if (end - first == 1) whole.layers.back().name = std::string(module(*first));
    first = end;
  }
  return whole;
}

}  // namespace dynmo::cost
