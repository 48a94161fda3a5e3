// SPDX-License-Identifier: Apache-2.0
#pragma once

// The choice between equal bits and speed on devices: run.deterministic. Operations of the CPU give
// equal bits either way.

namespace dynmo::c10d {

enum class Determinism { kNotDemanded, kDemanded };

// Sets which operations libtorch chooses on all devices of this process.
//
// If equal bits are demanded, it chooses operations that give the same bits each time, and throws
// where there is none. Otherwise it chooses the fastest, as PyTorch does by default, such as
// attention by cuDNN.
void set_determinism(Determinism wanted);

}  // namespace dynmo::c10d
