// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <string>

#include "tests/support/temp_folder.h"

namespace dynmo {
namespace {

namespace fs = std::filesystem;

TEST(Files, WriteDurablyReplacesTheWholeFile) {
  const TempFolder folder;
  const fs::path path = folder.path() / "a.txt";
  ASSERT_TRUE(write_file_durably(path, "long content"));
  ASSERT_TRUE(write_file_durably(path, "short"));
  EXPECT_EQ(*read_file(path), "short");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1);
  const auto missing = read_file(folder.path() / "none");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kBadInput);
}

TEST(Files, ALinkedFileIsReplacedAndTheLinkStays) {
  const TempFolder folder;
  const fs::path file = folder.write("there/a.txt", "old");
  const fs::path link = folder.path() / "link";
  fs::create_symlink(file, link);
  ASSERT_TRUE(write_file_durably(link, "new"));
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(*read_file(file), "new");
}

TEST(Files, AFolderOfThatNameStays) {
  const TempFolder folder;
  const fs::path path = folder.path() / "a.txt";
  fs::create_directories(path / "more");
  EXPECT_FALSE(write_file_durably(path, "text"));
  EXPECT_TRUE(fs::is_directory(path / "more"));
}

TEST(Files, AnOpenDescriptorIsWrittenWhereItStands) {
  const TempFolder folder;
  const fs::path path = folder.write("out.txt", "");
  const int file = ::open(path.c_str(), O_WRONLY);
  ASSERT_GE(file, 0);
  ASSERT_EQ(::write(file, "before ", 7), 7);
  for (const char* names : {"/dev/fd/{}", "/proc/self/fd/{}"}) {
    ASSERT_TRUE(write_file_durably(fmt::format(fmt::runtime(names), file), "plan "));
  }
  ASSERT_EQ(::write(file, "after", 5), 5);
  ::close(file);
  EXPECT_EQ(*read_file(path), "before plan plan after");
}

TEST(Files, APipeIsReadAndWritten) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  ASSERT_TRUE(write_file_durably(fmt::format("/dev/fd/{}", ends[1]), "text"));
  ::close(ends[1]);
  EXPECT_EQ(*read_file(fmt::format("/dev/fd/{}", ends[0])), "text");
  ::close(ends[0]);
}

TEST(Files, TheLongestNameIsWritten) {
  const TempFolder folder;
  EXPECT_TRUE(write_file_durably(folder.path() / std::string(255, 'n'), "text"));
}

TEST(Files, NamesTheSystemRefusesAreBadInputThatNamesThem) {
  const TempFolder folder;
  const fs::path loop = folder.path() / "loop";
  fs::create_symlink("loop", loop);
  for (const fs::path& path : {loop, loop / "file", folder.path() / std::string(300, 'n')}) {
    for (const Error& error : {read_file(path).error(), write_file_durably(path, "text").error()}) {
      EXPECT_EQ(error.code, ErrorCode::kBadInput);
      EXPECT_NE(error.message.find(path.string()), std::string::npos) << error.message;
    }
    EXPECT_FALSE(is_same_file(path, folder.path() / "other"));
    EXPECT_FALSE(is_same_file(folder.path() / "other", path));
  }
}

TEST(Files, MoreThanTheLimitIsRefused) {
  const TempFolder folder;
  const fs::path path = folder.write("a.txt", std::string(1024, 'x'));
  EXPECT_TRUE(read_file(path, 1024));
  EXPECT_EQ(read_file(path, 1023).error().message,
            fmt::format("'{}' has more than 1023 B, wanted a smaller file", path.string()));
}

TEST(Files, HalfALineIsCut) {
  const TempFolder folder;
  for (const auto& [before, after] :
       {std::pair{"", ""}, {"a", ""}, {"\n", "\n"}, {"a\n", "a\n"}, {"a\nb\nhalf", "a\nb\n"}}) {
    const fs::path path = folder.write("lines", before);
    ASSERT_TRUE(cut_torn_line(path));
    EXPECT_EQ(*read_file(path), after);
  }
  EXPECT_TRUE(cut_torn_line(folder.path() / "none"));
  EXPECT_FALSE(fs::exists(folder.path() / "none"));
  EXPECT_TRUE(cut_torn_line("/dev/null"));
}

TEST(Files, OneFileByTwoNamesIsTheSame) {
  const TempFolder folder;
  const fs::path file = folder.write("a.txt", "");
  fs::create_symlink(file, folder.path() / "link");
  EXPECT_TRUE(is_same_file(file, folder.path() / "." / "a.txt"));
  EXPECT_TRUE(is_same_file(file, folder.path() / "link"));
  EXPECT_TRUE(is_same_file(folder.path() / "new", folder.path() / "." / "new"));
  EXPECT_FALSE(is_same_file(file, folder.path() / "new"));
  EXPECT_FALSE(is_same_file("/dev/null", "/dev/null"));
}

}  // namespace
}  // namespace dynmo
