// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tells processes that read the same steady clock from those that do not.

#include <filesystem>
#include <string>

namespace dynmo::process {

// Returns the name of the steady clock that this process reads. Two processes with the same name
// share the clock. The name has the boot of the kernel and the time namespace, because containers
// of one host may differ in their clocks. Returns "" if /proc does not tell. `root` holds proc/.
[[nodiscard]] std::string steady_clock_id(const std::filesystem::path& root = "/");

}  // namespace dynmo::process
