// SPDX-License-Identifier: Apache-2.0
#pragma once

// The cost of one layer, measured by the profiler, derived by a load model, or read from a profile.
// The planner and the simulator know a model only as a list of these.

#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"

namespace dynmo::cost {

// The cost of one layer. Times are seconds for one micro-batch on a rank of speed 1, and `update_s`
// is once a step.
struct LayerCost {
  std::string name;
  double forward_s = 0;
  double backward_input_s = 0;   // I: gradient of the layer's input
  double backward_weight_s = 0;  // W: gradient of its weights
  double update_s = 0;           // optimizer's update of its weights, once a step
  Bytes parameter_bytes;
  Bytes gradient_bytes;
  Bytes optimizer_bytes;
  Bytes copy_bytes;        // parameters rounded to 16 bits: held, frozen or not; never moved
  Bytes activation_bytes;  // stash of one micro-batch, from the start of F to the end of W
  Bytes boundary_bytes;    // output sent to the next layer, one micro-batch
  bool frozen = false;     // runs forward only if all layers before it are frozen too
  // Expected time of the products with the layer's matrices after pruning, relative to dense
  // matrices. Costs measured at one value are scaled to another (control/profiler.h).
  double product_time = 1;
  friend bool operator==(const LayerCost&, const LayerCost&) = default;
};

struct ModelCost {
  std::vector<LayerCost> layers;  // by LayerId

  [[nodiscard]] int size() const { return static_cast<int>(layers.size()); }
  // Returns the length of the frozen prefix. Its layers run forward only, stash nothing and get no
  // gradient.
  [[nodiscard]] int frozen_layers() const;
  friend bool operator==(const ModelCost&, const ModelCost&) = default;
};

// Limits for one layer. Larger values are a wrong unit, and would overflow sums.
inline constexpr double kMaxSeconds = 1e6;
inline constexpr Bytes kMaxBytes{std::int64_t{1} << 50};

// Checks the costs of a model. Returns kBadInput with layer and field, or for no layers. Times must
// be finite, and from 0 to kMaxSeconds. Bytes must be 0 to kMaxBytes, and product_time in (0, 1].
[[nodiscard]] Expected<void> validate(const ModelCost& model);
// Like validate(), and also checks the micro-batches. There must be at least 1, and their bytes
// must stay below 2^62.
[[nodiscard]] Expected<void> validate(const ModelCost& model, int micro_batches);

// Returns the seconds of one micro-batch: F + I + W + update_s / micro_batches. Passes that do not
// run are left out. These are I and W of the frozen prefix, and W of a frozen layer behind it.
[[nodiscard]] double work_s(const ModelCost& model, int layer, int micro_batches);

// Returns work_s() of every layer, in one pass.
[[nodiscard]] std::vector<double> layer_work_s(const ModelCost& model, int micro_batches);

// Returns the bytes of parameters, gradients and optimizer state that a rank holds. A frozen layer
// has only the parameters and their copy.
[[nodiscard]] Bytes state_bytes(const LayerCost& layer);

}  // namespace dynmo::cost
