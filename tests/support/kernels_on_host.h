// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kernels of devices (kernels/device/kernels.cu) compiled for the CPU, where each thread of a
// block is a round of a loop. For tests without a GPU.

#include <functional>

#include "dynmo/kernels/device/launcher.h"

namespace dynmo::testing {

// Runs the kernel of a call on the calling thread. `pointers` are those of its arguments
// (device::packed()). Throws std::out_of_range for an unknown kernel.
void run_kernel_on_host(const kernels::device::Call& call, void** pointers);

// Lets the CPU have kernels: a launcher that runs them at once.
void set_launcher_of_host();

}  // namespace dynmo::testing
