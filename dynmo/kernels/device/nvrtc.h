// SPDX-License-Identifier: Apache-2.0
#pragma once

// Compiles kernels.cu with NVRTC, NVIDIA's compiler library. PyTorch for CUDA ships it. It needs
// neither a driver nor a device.

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo::kernels::device {

// Returns the cubin for an architecture such as "sm_90". `library` is the path or name of NVRTC's
// library. Returns kBadInput if it cannot be loaded, does not know the architecture, or rejects the
// source.
[[nodiscard]] Expected<std::string> compile_kernels(const std::filesystem::path& library,
                                                    std::string_view architecture);

// Like compile_kernels(), with the first of `libraries` that compiles them. Returns the error of
// the first library that refuses them, or else of the last that cannot be loaded. Caches the result
// in the folder `cache`, by source, version of NVRTC and architecture. If the folder cannot be
// written, nothing is cached.
[[nodiscard]] Expected<std::string> kept_kernels(
    const std::vector<std::filesystem::path>& libraries, std::string_view architecture,
    const std::filesystem::path& cache);

// Returns the libraries to try: NVIDIA's packages beside the libtorch in `torch_lib`, and plain
// names for the dynamic loader.
[[nodiscard]] std::vector<std::filesystem::path> nvrtc_libraries(
    const std::filesystem::path& torch_lib);

}  // namespace dynmo::kernels::device
