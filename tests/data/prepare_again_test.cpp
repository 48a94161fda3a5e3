// SPDX-License-Identifier: Apache-2.0
// Preparations that replace a data set, and those that fail or were killed.
#include <gtest/gtest.h>

#include <filesystem>
#include <iterator>
#include <string>

#include "dynmo/data/dataset.h"
#include "tests/data/prepared.h"
#include "tests/support/full_disk.h"

namespace dynmo::data {
namespace {

TEST(PrepareAgain, AFailureLeavesTheOlderDataSetWhole) {
  const TempFolder folder;
  const Paths good = {folder.write("a.txt", "old")};
  ASSERT_TRUE(prepare(good, options_for(folder)));
  const Paths bad = {folder.write("b.txt", "new"), folder.path() / "none"};
  EXPECT_FALSE(prepare(bad, options_for(folder)));
  const auto dataset = open_dataset(folder.path() / "out");
  ASSERT_TRUE(dataset) << dataset.error().message;
  EXPECT_TRUE(verify(*dataset));
  EXPECT_EQ(documents_of(dataset->train), (std::vector<std::string>{"old"}));
}

TEST(PrepareAgain, AFullDiskAtTheEndLeavesTheOlderDataSetWhole) {
  const TempFolder folder;
  const Paths good = {folder.write("a.txt", "old")};
  ASSERT_TRUE(prepare(good, options_for(folder)));
  const Paths larger = {folder.write("b.txt", std::string(5000, 'n'))};
  for (const rlim_t bytes : {1000U, 9000U}) {  // too few for the tokens, and for the index of many
    folder.write(
        "c.jsonl", bytes == 1000U ? "" : [] {
          std::string lines;
          for (int i = 0; i < 1000; ++i) lines += "{\"text\": \"a\"}\n";
          return lines;
        }());
    const Paths many = {folder.path() / "c.jsonl"};
    {
      const FullDisk full(bytes);
      EXPECT_FALSE(prepare(bytes == 1000U ? larger : many, options_for(folder)));
    }
    const auto dataset = open_dataset(folder.path() / "out");
    ASSERT_TRUE(dataset) << dataset.error().message;
    EXPECT_TRUE(verify(*dataset));
    EXPECT_EQ(documents_of(dataset->train), (std::vector<std::string>{"old"}));
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path() / "out"),
                            std::filesystem::directory_iterator()),
              5)
        << "nothing unfinished is left";
  }
}

TEST(PrepareAgain, WhatAKilledCallLeavesCanBeOverwritten) {
  const TempFolder folder;
  const Paths paths = {folder.write("a.txt", "text")};
  for (const char* name : {"out/train.bin", "out/train.idx.4711.new", "out/dataset.json.4711.new",
                           "out/validation.bin.tmp", "out/validation.idx.tmp"}) {
    folder.write(name, "unfinished");
  }
  EXPECT_TRUE(prepare(paths, options_for(folder)));
  folder.write("out/mine.4711.new", "of another program");
  std::filesystem::remove(folder.path() / "out" / "dataset.json");
  EXPECT_FALSE(prepare(paths, options_for(folder)));
}

TEST(PrepareAgain, AnOpenDataSetOutlivesItsReplacement) {
  const TempFolder folder;
  const Paths paths = {folder.write("a.txt", std::string(100000, 'o'))};
  ASSERT_TRUE(prepare(paths, options_for(folder)));
  const auto before = open_dataset(folder.path() / "out");
  folder.write("a.txt", "short");
  ASSERT_TRUE(prepare(paths, options_for(folder)));
  EXPECT_EQ(documents_of(before->train)[0], std::string(100000, 'o'));
}

}  // namespace
}  // namespace dynmo::data
