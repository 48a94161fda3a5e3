// SPDX-License-Identifier: Apache-2.0
#pragma once

// Every load model starts from these inputs: the model's shape, the device that its dense costs are
// derived for, the length of the run and the seed of everything that is drawn.

#include <cstdint>

#include "dynmo/cost/transformer.h"

namespace dynmo::dynamism {

struct LoadInputs {
  cost::TransformerShape shape;
  cost::Device device;
  std::uint64_t seed = 1;
  std::int64_t steps = 10'000;  // of the run: what parameters that are shares of the run refer to
  int micro_batches = 32;       // of a step
};

}  // namespace dynmo::dynamism
