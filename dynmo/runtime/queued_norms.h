// SPDX-License-Identifier: Apache-2.0
#pragma once

// Squared norms of the gradients of a rank's layers, where a device computes them. Asking for each
// number by itself makes the host wait for each. Here all are queued, and read once the host has
// waited for the device.

#include <ATen/core/Tensor.h>

#include <map>
#include <utility>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/tie.h"
#include "dynmo/runtime/staging.h"

namespace dynmo::runtime {

class QueuedNorms {
 public:
  // Queues the norms of the layers that train, and their copy to host memory. Leaves out parameters
  // that are second in a tie. Does not wait. Requires a staging with a device.
  QueuedNorms(const std::vector<model::Tie>& ties, const model::LayerStates& states,
              const Staging& staging);

  // Returns the sum of squares of each layer, like squared_norm() in ties.h. Call it after the host
  // has waited for the device.
  [[nodiscard]] std::map<LayerId, double> read() const;

 private:
  std::vector<std::pair<LayerId, int>> counts_;  // number of gradients of each layer
  at::Tensor host_;                              // norms of all of them
};

}  // namespace dynmo::runtime
