// SPDX-License-Identifier: Apache-2.0
#include "dynmo/c10d/determinism.h"

#include <ATen/Context.h>

namespace dynmo::c10d {

void set_determinism(Determinism wanted) {
  const bool demanded = wanted == Determinism::kDemanded;
  at::Context& context = at::globalContext();
  context.setDeterministicAlgorithms(demanded, /*warn_only=*/false);
  context.setDeterministicFillUninitializedMemory(false);  // ours is written before it is read
  context.setSDPUseCuDNN(!demanded);  // libtorch's call of cuDNN asks for no order of its sums
}

}  // namespace dynmo::c10d
