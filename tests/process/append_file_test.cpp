// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/append_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <string_view>

#include "tests/support/temp_folder.h"

namespace dynmo::process {
namespace {

TEST(AppendFile, APipeWithoutAReaderIsRefused) {
  const TempFolder folder;
  const auto path = folder.path() / "pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const auto refused = AppendFile::open(path, AppendFile::Start::kAppend, "the log");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message,
            "cannot open the log '" + path.string() + "': No such device or address");
}

TEST(AppendFile, APipeWithAReaderGetsLines) {
  const TempFolder folder;
  const auto path = folder.path() / "pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const UniqueFd reader(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  auto file = AppendFile::open(path, AppendFile::Start::kAppend, "the log");
  ASSERT_TRUE(file) << file.error().message;
  ASSERT_TRUE(file->append("a line\n"));
  std::array<char, 16> bytes{};
  const auto got = ::read(reader.get(), bytes.data(), bytes.size());
  EXPECT_EQ(std::string_view(bytes.data(), static_cast<std::size_t>(got)), "a line\n");
}

TEST(AppendFile, LinesGoBehindThoseOfOthers) {
  const TempFolder folder;
  const auto path = folder.path() / "file";
  auto one = AppendFile::open(path, AppendFile::Start::kEmpty, "the log");
  auto other = AppendFile::open(path, AppendFile::Start::kAppend, "the log");
  ASSERT_TRUE(one && other);
  ASSERT_TRUE(one->append("a\n"));
  ASSERT_TRUE(other->append("b\n"));
  ASSERT_TRUE(one->append("c\n"));
  EXPECT_EQ(std::filesystem::file_size(path), 6U);
}

}  // namespace
}  // namespace dynmo::process
