// SPDX-License-Identifier: Apache-2.0
#pragma once

// Finds the libtorch that `dynmo-runtime` loads. PyTorch is installed apart from DynMo, and a
// program that was built elsewhere does not know where.

#include <filesystem>
#include <string>

#include "dynmo/core/expected.h"

namespace dynmo::app {

// Returns LD_LIBRARY_PATH for `program`: this process's own, behind the folder of libtorch if the
// dynamic loader would not find it.
//
// The folder is in DYNMO_TORCH_DIR, a folder `torch` of an installed PyTorch. If that is not set,
// it is the first that exists of three, as in cmake/FindLibTorch.cmake. These are the folder of the
// build, python3's PyTorch, and the private copy of scripts/setup. Only a PyTorch of the series
// that DynMo was built with is used, because its C++ interface changes with each series. Returns
// kBadInput with what was found, or with the libraries that are still missing.
[[nodiscard]] Expected<std::string> library_path_of(const char* command,
                                                    const std::filesystem::path& program);

}  // namespace dynmo::app
