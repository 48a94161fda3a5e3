// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/mapped_file.h"

#include <gtest/gtest.h>

#include "dynmo/core/files.h"
#include "tests/support/temp_folder.h"

namespace dynmo::data {
namespace {

std::string_view text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

TEST(MappedFile, HasTheBytesOfTheFile) {
  const TempFolder folder;
  for (const std::string text : {"", "text"}) {
    const auto file = MappedFile::open(folder.write("a", text));
    ASSERT_TRUE(file) << file.error().message;
    EXPECT_EQ(text_of(**file), text);
  }
}

// Linux's own file system of its settings maps no file, as some in user space do not.
TEST(MappedFile, IsReadWhereTheFileSystemMapsNone) {
  const std::filesystem::path notes = "/sys/kernel/notes";
  const auto wanted = read_file(notes);
  if (!wanted || wanted->empty()) GTEST_SKIP() << "no " << notes;
  const auto file = MappedFile::open(notes);
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_TRUE(text_of(**file) == *wanted);
}

}  // namespace
}  // namespace dynmo::data
