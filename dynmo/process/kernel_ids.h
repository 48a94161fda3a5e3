// SPDX-License-Identifier: Apache-2.0
#pragma once

// Names of what processes of one kernel share. Host names do not tell, because two machines and
// many containers may have the same. Each function returns "" if /proc does not tell. `root` holds
// proc/.

#include <filesystem>
#include <string>

namespace dynmo::process {

// Returns the name of the kernel's boot, which processes of one machine share until it restarts.
[[nodiscard]] std::string boot_id(const std::filesystem::path& root = "/");

// Returns the name of the steady clock that this process reads. Two processes with the same name
// share the clock. The name has the boot of the kernel and the time namespace, because containers
// of one host may differ in their clocks.
[[nodiscard]] std::string steady_clock_id(const std::filesystem::path& root = "/");

// Returns the name of the process ids that this process sees, by the kernel's boot and the PID
// namespace. Two processes with the same name are in each other's /proc.
[[nodiscard]] std::string process_space(const std::filesystem::path& root = "/");

}  // namespace dynmo::process
