// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/dataset.h"

#include <gtest/gtest.h>

#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "dynmo/data/prepare.h"
#include "tests/support/mutate.h"
#include "tests/support/temp_folder.h"

namespace dynmo::data {
namespace {

TEST(Dataset, NoticesFilesThatAreNotThoseOfItsDescription) {
  const TempFolder folder;
  PrepareOptions options;
  options.out = folder.path() / "out";
  options.validation = 0;
  const std::vector<std::filesystem::path> paths = {folder.write("a.txt", "some text")};
  ASSERT_TRUE(prepare(paths, options));
  const auto bin = folder.path() / "out" / "train.bin";
  std::string bytes = *read_file(bin);
  bytes[4] = static_cast<char>(bytes[4] ^ 1);
  folder.write("out/train.bin", bytes);
  const auto dataset = open_dataset(folder.path() / "out");
  ASSERT_TRUE(dataset);
  EXPECT_NE(verify(*dataset).error().message.find("train: the digest"), std::string::npos);
  for (const char* ending : {".bin", ".idx"}) {
    std::filesystem::copy(folder.path() / "out" / (std::string("validation") + ending),
                          folder.path() / "out" / (std::string("train") + ending),
                          std::filesystem::copy_options::overwrite_existing);
  }
  EXPECT_NE(open_dataset(folder.path() / "out").error().message.find("wanted 1 and 10"),
            std::string::npos);
}

TEST(Dataset, ADamagedDescriptionIsAnErrorOrTheSameDescription) {
  const TempFolder folder;
  const DatasetDescription description{.tokenizer = "bytes",
                                       .vocabulary = 257,
                                       .end_of_document = 256,
                                       .seed = ~0ULL,
                                       .validation_share = 0.02,
                                       .train = {.documents = 3, .tokens = 40},
                                       .validation = {.documents = 1, .tokens = 9}};
  ASSERT_TRUE(write_description(folder.path(), description));
  const auto back = read_description(folder.path());
  ASSERT_TRUE(back) << back.error().message;
  EXPECT_EQ(*back, description);
  const std::string text = *read_file(folder.path() / "dataset.json");
  for (std::size_t size = 0; size + 2 < text.size(); ++size) {
    folder.write("dataset.json", text.substr(0, size));
    ASSERT_FALSE(read_description(folder.path())) << size;
  }
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    Rng rng(mix_key({seed, 33}));
    folder.write("dataset.json", mutate(text, rng));
    const auto read = read_description(folder.path());
    if (read) continue;
    EXPECT_EQ(read.error().message.find('\n'), std::string::npos) << "seed " << seed;
  }
}

}  // namespace
}  // namespace dynmo::data
