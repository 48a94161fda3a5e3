// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/clock_id.h"

#include <fstream>
#include <system_error>

namespace dynmo::process {

std::string steady_clock_id(const std::filesystem::path& root) {
  std::ifstream file(root / "proc/sys/kernel/random/boot_id");
  std::string id;
  if (!(file >> id)) return "";
  std::error_code fault;
  const auto time = std::filesystem::read_symlink(root / "proc/self/ns/time", fault);
  // Kernels before 5.6 have one clock for all.
  if (fault == std::errc::no_such_file_or_directory) return id;
  return fault ? "" : id + " " + time.string();
}

}  // namespace dynmo::process
