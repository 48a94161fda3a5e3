// SPDX-License-Identifier: Apache-2.0
#include "tests/support/golden.h"

#include "dynmo/data/dataset.h"
#include "tests/support/temp_folder.h"

namespace dynmo::data {
namespace {

TEST(DataGoldens, ADatasetIsWrittenAsItWasRead) {
  for (const char* name : {"dataset.json", "byte_dataset.json"}) {
    const TempFolder folder;
    const auto text = read_file(std::filesystem::path(DYNMO_TESTS) / "data/goldens" / name);
    ASSERT_TRUE(text) << text.error().message;
    folder.write("dataset.json", *text);
    const auto description = read_description(folder.path());
    ASSERT_TRUE(description) << description.error().message;
    std::filesystem::remove(folder.path() / "dataset.json");
    ASSERT_TRUE(write_description(folder.path(), *description));
    EXPECT_EQ(*read_file(folder.path() / "dataset.json"), *text);
  }
}

TEST(DataGoldens, RefusalsStayTheSame) {
  expect_refusals("data/goldens/dataset.json", [](const std::string& text) -> Expected<void> {
    const TempFolder folder;
    folder.write("dataset.json", text);
    DYNMO_TRY(read_description(folder.path()));
    return {};
  });
}

}  // namespace
}  // namespace dynmo::data
