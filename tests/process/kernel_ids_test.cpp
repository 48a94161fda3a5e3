// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/kernel_ids.h"

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

void link_namespace(const std::filesystem::path& root, const char* kind, const char* name) {
  std::filesystem::create_directories(root / "proc/self/ns");
  std::filesystem::remove(root / "proc/self/ns" / kind);
  std::filesystem::create_symlink(name, root / "proc/self/ns" / kind);
}

TEST(ClockId, IsOfABootAndATimeNamespace) {
  const TempFolder folder;
  EXPECT_EQ(steady_clock_id(folder.path()), "");
  write_boot_id(folder.path(), "1234-5");
  EXPECT_EQ(steady_clock_id(folder.path()), "1234-5");  // a kernel without time namespaces
  link_namespace(folder.path(), "time", "time:[17]");
  const std::string first = steady_clock_id(folder.path());
  EXPECT_EQ(first, "1234-5 time:[17]");
  link_namespace(folder.path(), "time", "time:[18]");
  EXPECT_NE(steady_clock_id(folder.path()), first);
}

TEST(ClockId, IsTheSameInOneProcess) { EXPECT_EQ(steady_clock_id(), steady_clock_id()); }

TEST(ProcessSpace, IsOfABootAndAPidNamespace) {
  const TempFolder folder;
  link_namespace(folder.path(), "pid", "pid:[17]");
  EXPECT_EQ(process_space(folder.path()), "");
  write_boot_id(folder.path(), "1234-5");
  EXPECT_EQ(process_space(folder.path()), "1234-5 pid:[17]");
  EXPECT_EQ(process_space(), process_space());
}

}  // namespace
}  // namespace dynmo::process
