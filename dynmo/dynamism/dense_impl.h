// SPDX-License-Identifier: Apache-2.0
#pragma once

// The dense model that a source of dynamism makes cheaper: work and costs by layer, and which block
// a layer belongs to.

#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/dynamism/load_inputs.h"

namespace dynmo::dynamism {

inline constexpr int kNoBlock = -1;

struct DenseModel {
  cost::TransformerShape shape;
  cost::Device device;
  std::vector<cost::LayerWork> work;
  cost::ModelCost costs;
  std::vector<int> block;  // by layer; kNoBlock for embedding and head

  [[nodiscard]] int size() const { return costs.size(); }
  [[nodiscard]] cost::LayerKind kind(int layer) const;
  // Costs of a layer that does this much work instead.
  [[nodiscard]] cost::LayerCost cost_of(const cost::LayerWork& layer) const;
};

// kBadInput as cost::transformer_costs says, or for steps below 1 (naming `source`).
[[nodiscard]] Expected<DenseModel> make_dense(std::string_view source, const LoadInputs& inputs);

}  // namespace dynmo::dynamism
