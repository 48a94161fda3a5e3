// SPDX-License-Identifier: Apache-2.0
#pragma once

// The cost of one layer is measured by the profiler, derived by a load model, or read from a
// profile. The planner and the simulator know a model only as a list of these.

#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"

namespace dynmo::cost {

// Times are seconds for one micro-batch on a rank of speed 1; `update_s` is once a step.
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
  // Time of the products with the layer's matrices relative to all of them dense, as expected of
  // what pruning has left: costs measured at one value follow for another (control/profiler.h).
  double product_time = 1;
  friend bool operator==(const LayerCost&, const LayerCost&) = default;
};

struct ModelCost {
  std::vector<LayerCost> layers;  // by LayerId

  [[nodiscard]] int size() const { return static_cast<int>(layers.size()); }
  // Length of the frozen prefix: layers that run forward only, stash nothing, get no gradient.
  [[nodiscard]] int frozen_layers() const;
  friend bool operator==(const ModelCost&, const ModelCost&) = default;
};

// More than these in one layer is a unit gone wrong, and would overflow sums.
inline constexpr double kMaxSeconds = 1e6;
inline constexpr Bytes kMaxBytes{std::int64_t{1} << 50};

// kBadInput naming layer and field: no layers, a time that is negative, not finite or above
// kMaxSeconds, bytes below 0 or above kMaxBytes, a product_time outside (0, 1].
[[nodiscard]] Expected<void> validate(const ModelCost& model);
// The same, and that `micro_batches` is at least 1 and the bytes of all of them stay below 2^62.
[[nodiscard]] Expected<void> validate(const ModelCost& model, int micro_batches);

// Work of one micro-batch: F + I + W, what does not run left out (I and W of the frozen prefix; W
// of a frozen layer behind it), plus the layer's share update_s / micro_batches of the step's end.
[[nodiscard]] double work_s(const ModelCost& model, int layer, int micro_batches);

// work_s of every layer, in one pass.
[[nodiscard]] std::vector<double> layer_work_s(const ModelCost& model, int micro_batches);

// Parameters, gradients and optimizer state as the rank holds them (frozen: parameters and their
// copy only).
[[nodiscard]] Bytes state_bytes(const LayerCost& layer);

}  // namespace dynmo::cost
