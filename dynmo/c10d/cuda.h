// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CUDA half of libtorch, which a run that asks for it loads, and no other: programs start small
// and work on machines that have no driver. No CUDA header is needed, here or where tensors on a
// device are used: libtorch's own interfaces know no kind of device by name.

#include <c10/core/Device.h>

#include <filesystem>

#include "dynmo/core/expected.h"

namespace dynmo::c10d {

// Loads libtorch_cuda.so from `folder`, by default that of the libtorch in use. How many devices
// there are: at least 1. Any thread may call it, any number of times; before tensors are used, as
// libtorch remembers that there was no CUDA. kBadInput, saying what to do: the library is missing
// or one that it needs is, there is no driver or no device.
[[nodiscard]] Expected<int> load_cuda();
[[nodiscard]] Expected<int> load_cuda(const std::filesystem::path& folder);

// The same, and makes a device the calling thread's: that of number `local_rank` modulo how many
// there are, so that ranks of one host that are more than its devices share them. From then on
// libtorch takes operations that give the same bits each time, where it has a choice, and refuses
// those that it knows not to.
[[nodiscard]] Expected<at::Device> open_cuda(int local_rank);

}  // namespace dynmo::c10d
