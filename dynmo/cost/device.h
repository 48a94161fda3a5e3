// SPDX-License-Identifier: Apache-2.0
#pragma once

// A device describes the hardware of a rank for analytic costs. It has the peak arithmetic, the
// memory bandwidth, and the share of both that training reaches. Presets of common devices have the
// sources of their numbers.

#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"

namespace dynmo::cost {

struct Device {
  std::string name;
  double flops_per_s = 0;            // peak, dense, of the training precision
  double bandwidth_bytes_per_s = 0;  // peak, of its memory
  double matrix_efficiency = 1;      // share of the peak that large products reach
  double core_efficiency = 1;        // share of the peak that attention's core reaches
  double bandwidth_efficiency = 1;   // share of the bandwidth that element-wise kernels reach
  // Speed of whole training steps relative to that of their kernels (the three fields above).
  // Launches, gaps and recomputation take the rest. Calibrated on published runs
  // (docs/costs.md).
  double utilization = 1;
  Bytes memory;
  double bytes_per_element = 2;  // activations and messages
  // Training state of a parameter, as in Megatron-LM's mixed precision. A bfloat16 weight, float32
  // gradient, float32 master copy and two moments have 18 bytes together.
  double bytes_per_parameter = 2;
  double bytes_per_gradient = 4;
  double bytes_per_optimizer = 12;
  int devices_per_node = 8;  // of machines usually built from it
  Link inside_node;          // of these, per device and direction
  Link between_nodes;        // without the latency of software above it
};

// Checks a device. Returns kBadInput with device and field. Rates, memory and bytes must be finite
// and above 0, and efficiencies in (0, 1].
[[nodiscard]] Expected<void> validate(const Device& device);

// Returns h200, h100, a100 and cpu. docs/costs.md has the table with every source.
[[nodiscard]] const std::vector<Device>& devices();

// Finds a device by name, in small or capital letters. Returns kBadInput with the nearest name or
// all of them.
[[nodiscard]] Expected<Device> find_device(std::string_view name);

}  // namespace dynmo::cost
