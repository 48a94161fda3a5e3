// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <vector>

#include "dynmo/core/units.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/product_fit.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/runtime/pipeline_options.h"

namespace dynmo::runtime {

[[nodiscard]] Bytes bytes_of_shape(const std::vector<std::int64_t>& shape, at::ScalarType type);

// Returns what is known of the layers before a measurement: names and bytes. `pruned` has the
// shapes of pruned layers, and `fit` the time of their products.
[[nodiscard]] cost::ModelCost known_costs(const model::Model& model, const PipelineOptions& options,
                                          const std::map<LayerId, model::StateShape>& pruned = {},
                                          const cost::ProductFit& fit = {});

}  // namespace dynmo::runtime
