// SPDX-License-Identifier: Apache-2.0
#pragma once

// Loads the CUDA half of libtorch, only for a run that requests it. So programs start small and
// work on machines without a driver. Neither this header nor users of device tensors need a header
// of CUDA.

#include <c10/core/Device.h>

#include <filesystem>

#include "dynmo/c10d/determinism.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"

namespace dynmo::c10d {

// Loads libtorch_cuda.so from `folder`, by default that of the libtorch in use. Returns the number
// of devices, at least 1. Any thread may call it, any number of times. Call it before tensors are
// used, because libtorch remembers that there was no CUDA.
//
// Returns kBadInput, with what to do, if the library or one that it needs is missing, or if there
// is no driver or device.
[[nodiscard]] Expected<int> load_cuda();
[[nodiscard]] Expected<int> load_cuda(const std::filesystem::path& folder);

// Like load_cuda(). Also makes device `local_rank` modulo the number of devices the current one of
// the calling thread, and returns it. So ranks of one host share devices if they outnumber them.
// Calls set_determinism().
[[nodiscard]] Expected<at::Device> open_cuda(int local_rank, Determinism determinism);

// Returns the total memory of an open device.
[[nodiscard]] Bytes cuda_memory(at::Device device);

}  // namespace dynmo::c10d
