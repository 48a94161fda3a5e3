// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/kernel_ids.h"

#include <fstream>
#include <system_error>

namespace dynmo::process {

std::string boot_id(const std::filesystem::path& root) {
  std::ifstream file(root / "proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

std::string steady_clock_id(const std::filesystem::path& root) {
  const std::string boot = boot_id(root);
  std::error_code fault;
  const auto time = std::filesystem::read_symlink(root / "proc/self/ns/time", fault);
  // Kernels before 5.6 have one clock for all.
  if (fault == std::errc::no_such_file_or_directory) return boot;
  return fault || boot.empty() ? "" : boot + " " + time.string();
}

std::string process_space(const std::filesystem::path& root) {
  const std::string boot = boot_id(root);
  std::error_code fault;
  const auto ids = std::filesystem::read_symlink(root / "proc/self/ns/pid", fault);
  return fault || boot.empty() ? "" : boot + " " + ids.string();
}

}  // namespace dynmo::process
