// SPDX-License-Identifier: Apache-2.0
#pragma once

// Joins the outputs of the rounds of a step. A step runs its schedule once for every round of
// accumulation.

#include "dynmo/runtime/engine.h"

namespace dynmo::runtime {

// Adds the output of one more round. `first` is the number of its first micro-batch among this
// replica's.
void append(StepOutput& step, StepOutput round, int first);

}  // namespace dynmo::runtime
