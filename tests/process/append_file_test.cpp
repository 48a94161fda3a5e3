// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/append_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <string>
#include <string_view>

#include "dynmo/core/files.h"
#include "tests/support/full_disk.h"
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

std::string text_of(const std::filesystem::path& path) {
  const auto text = read_file(path);
  return text ? *text : text.error().message;
}

TEST(AppendFile, APieceThatDoesNotFitTakesNoOtherLineAway) {
  const TempFolder folder;
  const auto path = folder.path() / "file";
  auto one = AppendFile::open(path, AppendFile::Start::kEmpty, "the log");
  auto other = AppendFile::open(path, AppendFile::Start::kAppend, "the log");
  ASSERT_TRUE(one && other);
  ASSERT_TRUE(one->append("first\n"));
  ASSERT_TRUE(other->append("of the other\n"));
  {
    const FullDisk full(30);
    const auto failed = one->append("longer than eleven bytes\n");
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().message,
              "cannot write the log '" + path.string() + "': File too large");
    EXPECT_EQ(text_of(path), "first\nof the other\n");
    EXPECT_TRUE(one->append("it fits\n"));
  }
  ASSERT_TRUE(other->append("last\n"));
  EXPECT_EQ(text_of(path), "first\nof the other\nit fits\nlast\n");
}

TEST(LineFile, GoesOnBehindTheLastWholeLine) {
  const TempFolder folder;
  const auto path = folder.write("file", "a\nhalf");
  auto file = LineFile::open(path, LineFile::Start::kAppend);
  ASSERT_TRUE(file) << file.error().message;
  ASSERT_TRUE(file->append("b\n"));
  EXPECT_EQ(text_of(path), "a\nb\n");
  EXPECT_TRUE(file->close());
  EXPECT_TRUE(LineFile::open(path, LineFile::Start::kEmpty));
  EXPECT_EQ(text_of(path), "");
}

TEST(LineFile, EndsWithItsFirstFailureAndSaysItOnce) {
  const TempFolder folder;
  const auto path = folder.path() / "file";
  auto file = LineFile::open(path, LineFile::Start::kEmpty);
  ASSERT_TRUE(file);
  ASSERT_TRUE(file->append("a\n"));
  EXPECT_FALSE(file->take_failure());
  {
    const FullDisk full(5);
    EXPECT_FALSE(file->append("too long\n"));
  }
  const auto later = file->append("b\n");
  const auto failure = file->take_failure();
  ASSERT_TRUE(failure && !later);
  EXPECT_EQ(failure->message, "cannot write '" + path.string() + "': File too large");
  EXPECT_EQ(later.error(), *failure);
  EXPECT_FALSE(file->take_failure());
  const auto closed = file->close();
  ASSERT_FALSE(closed);
  EXPECT_EQ(closed.error(), *failure);
  EXPECT_EQ(text_of(path), "a\n");
}

TEST(LineFile, NamesThePathAlone) {
  const TempFolder folder;
  const auto path = folder.path() / "none" / "file";
  const auto written = LineFile::open(path, LineFile::Start::kAppend);
  const auto created = LineFile::open(path, LineFile::Start::kEmpty, "create");
  ASSERT_TRUE(!written && !created);
  const std::string why = " '" + path.string() + "': No such file or directory";
  EXPECT_EQ(written.error().message, "cannot write" + why);
  EXPECT_EQ(created.error().message, "cannot create" + why);
}

}  // namespace
}  // namespace dynmo::process
