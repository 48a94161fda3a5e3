// SPDX-License-Identifier: Apache-2.0
#pragma once

// A step runs its schedule once for every round of accumulation; this makes one output of them.

#include "dynmo/runtime/engine.h"

namespace dynmo::runtime {

// Adds what one more round did; `first` is the number of its first micro-batch among this
// replica's.
void append(StepOutput& step, StepOutput round, int first);

}  // namespace dynmo::runtime
