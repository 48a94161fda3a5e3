// SPDX-License-Identifier: Apache-2.0
#pragma once

// Compiles kernels.cu by NVRTC, NVIDIA's compiler as a library. PyTorch for CUDA brings it. It
// needs neither a driver nor a device.

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo::kernels::device {

// Returns the program for an architecture such as "sm_90", as the driver loads it (a cubin).
// `library` names NVRTC's library. Returns kBadInput if it cannot be loaded, does not know the
// architecture, or finds a fault in the text.
[[nodiscard]] Expected<std::string> compile_kernels(const std::filesystem::path& library,
                                                    std::string_view architecture);

// Like compile_kernels() of the first of `libraries` that can be loaded. A result is kept in the
// folder `cache`, by text, version of NVRTC and architecture, and found there the next time. A
// folder that cannot be written keeps nothing.
[[nodiscard]] Expected<std::string> kept_kernels(
    const std::vector<std::filesystem::path>& libraries, std::string_view architecture,
    const std::filesystem::path& cache);

// Returns the places of NVRTC beside the libtorch in folder `torch_lib`, and by the loader's rules.
[[nodiscard]] std::vector<std::filesystem::path> nvrtc_libraries(
    const std::filesystem::path& torch_lib);

}  // namespace dynmo::kernels::device
