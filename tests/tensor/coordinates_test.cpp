// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::tensor {
namespace {

std::string fault_of(const std::string& text) {
  const auto tensor = parse_coordinates(text, "a.tns");
  return tensor ? "" : tensor.error().message;
}

TEST(Coordinates, WithoutAHeaderModesAreAsLargeAsTheirLargestIndex) {
  const auto tensor = parse_coordinates("# a comment\n4 4 2 2.0\n\n2\t2\t5\t1.7\n1 4 5 1.4",
                                        "a.tns", Values::kKept);
  ASSERT_TRUE(tensor) << tensor.error().message;
  EXPECT_EQ(tensor->sizes, (std::vector<std::uint64_t>{4, 4, 5}));
  EXPECT_EQ(tensor->indices[2], (std::vector<std::uint32_t>{1, 4, 4}));
  EXPECT_EQ(tensor->values, (std::vector<double>{2.0, 1.7, 1.4}));
}

TEST(Coordinates, SizesMayStandInFrontAloneOrAfterTheirNumber) {
  for (const char* text :
       {"10 20 30\n1 2 3 1\n", "3\n10 20 30\n1 2 3 1\n", "3\n10 20 30 \n1 2 3 1"}) {
    const auto tensor = parse_coordinates(text, "a.tns");
    ASSERT_TRUE(tensor) << text << ": " << tensor.error().message;
    EXPECT_EQ(tensor->sizes, (std::vector<std::uint64_t>{10, 20, 30})) << text;
    EXPECT_EQ(tensor->entries(), 1) << text;
    EXPECT_TRUE(tensor->values.empty()) << text;
  }
}

TEST(Coordinates, OfOneModeMayBeAVector) {
  const auto tensor = parse_coordinates("3 0.5\n1 0.25\n7 1\n9 1", "a.tns");
  ASSERT_TRUE(tensor) << tensor.error().message;
  EXPECT_EQ(tensor->sizes, (std::vector<std::uint64_t>{9}));
}

TEST(Coordinates, AFaultNamesFileAndLine) {
  const std::string good = "1 1 1\n2 2 1\n3 3 1\n";
  EXPECT_EQ(fault_of(good + "0 1 1\n"),
            "a.tns:4: the index of mode 1 is 0, wanted 1 for the first");
  EXPECT_EQ(fault_of(good + "1 2\n"),
            "a.tns:4: 2 numbers, wanted 3: the indices of 2 modes and a value");
  EXPECT_EQ(fault_of(good + "1 2 3 4\n"),
            "a.tns:4: 4 numbers, wanted 3: the indices of 2 modes and a value");
  EXPECT_EQ(fault_of(good + "1 x 3\n"), "a.tns:4: the index of mode 2 is no whole number");
  EXPECT_EQ(fault_of(good + "1 -1 3\n"), "a.tns:4: the index of mode 2 is no whole number");
  EXPECT_EQ(fault_of(good + "1 2 nan\n"),
            "a.tns:4: the value 'nan' is unreadable, NaN or above 1e100");
  EXPECT_EQ(fault_of("2\n3 3\n1 1 1\n4 1 1\n"),
            "a.tns:4: the index of mode 1 is 4, beyond its size 3");
  EXPECT_EQ(fault_of("4\n3 3\n1 1 1\n"), "a.tns:1: '4' modes, but the next line has 2 sizes");
  EXPECT_EQ(fault_of(""), "'a.tns' has no entry, wanted lines of indices from 1 and a value");
  EXPECT_EQ(fault_of("3 3\n"), fault_of("3 3\n"));
  EXPECT_EQ(fault_of("1 99999999999999999999 1\n1 1 1\n"),
            "a.tns:1: the index of mode 2 is no whole number");
}

TEST(Coordinates, AValueThatIsDroppedIsReadAllTheSame) {
  const std::string many(120, '9');
  for (const std::string value :
       {"1", "0.5", "2.", ".5", "-3", "1e3", "1e101", "nan", "inf", "1.2.3", "1..2", "0x1", "1 2",
        "", ".", "-", "+1", "0.5\r", many.c_str()}) {
    const std::string text = "1 2 3\n3 2 " + value + "\n";
    const auto dropped = parse_coordinates(text, "a.tns", Values::kDropped);
    const auto kept = parse_coordinates(text, "a.tns", Values::kKept);
    ASSERT_EQ(dropped.has_value(), kept.has_value()) << "'" << value << "'";
    if (kept) continue;
    EXPECT_EQ(dropped.error().message, kept.error().message) << "'" << value << "'";
  }
}

TEST(Coordinates, ReadFromAFileAreThoseOfItsText) {
  std::string text = "3\n1000 1000 1000\n";
  for (int i = 1; i <= 400000; ++i) {
    text += std::to_string(1 + i % 1000) + " " + std::to_string(1 + i / 1000) + " 7 0.5\n";
  }
  const std::filesystem::path path = testing::TempDir() + "/coordinates_test.tns";
  std::ofstream(path) << text;
  const auto read = read_coordinates(path);
  const auto parsed = parse_coordinates(text, "a.tns");
  std::filesystem::remove(path);
  ASSERT_TRUE(read && parsed);
  EXPECT_EQ(read->indices, parsed->indices);
  EXPECT_EQ(read->sizes, parsed->sizes);
}

TEST(Coordinates, AFileThatIsNotThereIsNamed) {
  const auto read = read_coordinates("/no/such/file.tns");
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().message, "cannot read '/no/such/file.tns': No such file or directory");
}

}  // namespace
}  // namespace dynmo::tensor
