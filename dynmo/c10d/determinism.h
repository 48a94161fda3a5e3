// SPDX-License-Identifier: Apache-2.0
#pragma once

// The choice between equal bits and speed on devices: run.deterministic. Operations of the CPU give
// equal bits either way.

namespace dynmo::c10d {

enum class Determinism { kNotDemanded, kDemanded };

// Sets what libtorch chooses from on all devices of this process.
//
// If equal bits are demanded, it chooses operations that give the same bits each time. It refuses
// those that have no such form. Otherwise it takes its fastest, as PyTorch does by default.
// Attention by cuDNN is one of them.
void set_determinism(Determinism wanted);

}  // namespace dynmo::c10d
