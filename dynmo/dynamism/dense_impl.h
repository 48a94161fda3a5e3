// SPDX-License-Identifier: Apache-2.0
#pragma once

// The dense model that a source of dynamism makes cheaper. It has work and costs by layer, and each
// layer's block.

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
  // Returns the costs of a layer with the work `layer` on the device of the dense model.
  [[nodiscard]] cost::LayerCost cost_of(const cost::LayerWork& layer) const;
};

// Makes the dense model. Returns kBadInput as cost::transformer_costs does, or for steps below 1,
// with the name `source`.
[[nodiscard]] Expected<DenseModel> make_dense(std::string_view source, const LoadInputs& inputs);

}  // namespace dynmo::dynamism
