// SPDX-License-Identifier: Apache-2.0
#pragma once

// The inputs of every load model. They are the model's shape, the device of its dense costs, the
// run's length, and the seed of all random draws.

#include <cstdint>

#include "dynmo/cost/transformer.h"

namespace dynmo::dynamism {

struct LoadInputs {
  cost::TransformerShape shape;
  cost::Device device;
  std::uint64_t seed = 1;
  std::int64_t steps = 10'000;  // of the run; parameters that are shares of the run refer to it
  int micro_batches = 32;       // of a step
};

}  // namespace dynmo::dynamism
