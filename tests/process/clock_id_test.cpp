// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/clock_id.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temp_folder.h"

namespace dynmo::process {
namespace {

void write_boot_id(const std::filesystem::path& root, const char* text) {
  std::filesystem::create_directories(root / "proc/sys/kernel/random");
  std::ofstream(root / "proc/sys/kernel/random/boot_id") << text << "\n";
}

void link_time(const std::filesystem::path& root, const char* name) {
  std::filesystem::create_directories(root / "proc/self/ns");
  std::filesystem::remove(root / "proc/self/ns/time");
  std::filesystem::create_symlink(name, root / "proc/self/ns/time");
}

TEST(ClockId, IsOfABootAndATimeNamespace) {
  const TempFolder folder;
  EXPECT_EQ(steady_clock_id(folder.path()), "");
  write_boot_id(folder.path(), "1234-5");
  EXPECT_EQ(steady_clock_id(folder.path()), "1234-5");  // a kernel without time namespaces
  link_time(folder.path(), "time:[17]");
  const std::string first = steady_clock_id(folder.path());
  EXPECT_EQ(first, "1234-5 time:[17]");
  link_time(folder.path(), "time:[18]");
  EXPECT_NE(steady_clock_id(folder.path()), first);
}

TEST(ClockId, IsTheSameInOneProcess) { EXPECT_EQ(steady_clock_id(), steady_clock_id()); }

}  // namespace
}  // namespace dynmo::process
