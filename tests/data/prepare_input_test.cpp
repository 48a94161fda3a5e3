// SPDX-License-Identifier: Apache-2.0
// What is taken for what, what is held out of it, and where it may be written.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/core/rng.h"
#include "dynmo/data/dataset.h"
#include "dynmo/data/prepare.h"
#include "tests/support/samples.h"
#include "tests/support/temp_folder.h"

namespace dynmo::data {
namespace {

using Inputs = std::vector<std::filesystem::path>;

PrepareOptions options_in(const TempFolder& folder, double share = 0) {
  PrepareOptions options;
  options.out = folder.path() / "out";
  options.overwrite = true;
  options.validation = share;
  return options;
}

std::string lines_of(int count, const std::string& key = "text") {
  std::string lines;
  for (int i = 0; i < count; ++i) {
    lines += Json({{key, fmt::format("line {} of a small corpus", i)}}).dump() + "\n";
  }
  return lines;
}

// Prepares one file, and says what it was taken for or why it was refused.
std::string taken_for(const std::string& name, std::string_view content,
                      InputFormat format = InputFormat::kAuto) {
  const TempFolder folder;
  const Inputs paths = {folder.write(name, content)};
  auto options = options_in(folder);
  options.format = format;
  const auto report = prepare(paths, options);
  if (!report)
    return report.error().message.substr(report.error().message.find(name) + name.size());
  return fmt::format("{} {}", report->train.documents, report->json_lines > 0 ? "lines" : "text");
}

TEST(PrepareInput, TheFirstLineTellsJsonLinesWhateverTheName) {
  const std::string lines = lines_of(20);
  for (const char* name : {"c.jsonl", "C.JSONL", "c.ndjson", "c.jsonlines", "c.json", "c.txt", "c",
                           "c.jsonl.part", "c.log"}) {
    EXPECT_EQ(taken_for(name, lines), "20 lines") << name;
    EXPECT_EQ(taken_for(name, "\xEF\xBB\xBF\r\n " + lines), "20 lines") << name;
  }
  // A first line of more than a buffer, and one without an end.
  EXPECT_EQ(taken_for("c.txt", Json({{"text", std::string(50000, 'x')}}).dump() + "\n" + lines),
            "21 lines");
  EXPECT_EQ(taken_for("c.json", R"({"text": "all of it"})"), "1 lines");
  EXPECT_EQ(taken_for("c.txt", lines, InputFormat::kText), "1 text");
  EXPECT_EQ(taken_for("c.txt", "prose\n" + lines), "1 text");
  EXPECT_EQ(taken_for("c.txt", "{braces} of prose\n"), "1 text");
  EXPECT_EQ(taken_for("c.txt", "{\n  \"a\": 1\n}\n"), "1 text");
  EXPECT_EQ(taken_for("c.log", lines_of(3, "message")), "1 text");
  EXPECT_EQ(taken_for("c.md", "[link](there)\n"), "1 text");
}

TEST(PrepareInput, JsonThatIsNoJsonLinesIsRefusedByName) {
  for (const std::string& content : {lines_of(3, "message"), std::string("[{\"text\": \"a\"}]"),
                                     std::string("{\n  \"text\": \"a\"\n}\n"), std::string("{}")}) {
    EXPECT_EQ(taken_for("c.json", content),
              "' is JSON, but not of an object with a string under 'text' a line: wanted JSON "
              "lines, another text key, or to take it for the text of one document");
    EXPECT_EQ(taken_for("c.json", content, InputFormat::kText), "1 text");
  }
  EXPECT_EQ(taken_for("c.txt", "{\"text\": \"a\"}\nprose\n").substr(0, 16), ":2: wanted JSON:");
  EXPECT_NE(taken_for("c.txt", "{\"text\": \"a\"}\nprose\n").find("the text of one document"),
            std::string::npos);
  EXPECT_EQ(taken_for("c.txt", "prose\n", InputFormat::kJsonLines).substr(0, 16),
            ":1: wanted JSON:");
}

TEST(PrepareInput, EndingsOfAFolderAreReadInAnyCase) {
  const TempFolder folder;
  folder.write("in/A.TXT", "one");
  folder.write("in/B.Md", "two");
  folder.write("in/C.JSONL", lines_of(2));
  folder.write("in/d.NDJSON", lines_of(2));
  folder.write("in/e.JPG", "no");
  folder.write("in/f.TXT.BZ2", "BZh");
  const Inputs paths = {folder.path() / "in"};
  const auto report = prepare(paths, options_in(folder));
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->train.documents, 6);
  EXPECT_EQ(report->json_lines, 2);
  EXPECT_EQ(report->skipped_ending, 1);
  EXPECT_EQ(report->skipped_compressed, 1);
}

TEST(PrepareInput, WhatIsNoTextIsNamedWithItsCause) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"caf\xe9\n", "byte 0xe9 at offset 3 is no UTF-8: convert it (iconv -f LATIN1 -t UTF-8)"},
      {"\x93quoted\x94", "byte 0x93 at offset 0 is no UTF-8"},
      {std::string("ab\0c", 4), "binary, with a NUL byte at offset 2"},
      {std::string("\xff\xfe\x61\0", 4), "UTF-16 text"},
      {"\xfd"
       "7zXZ",
       "byte 0xfd at offset 0 is no UTF-8"},
      {"PAR1\xff", "a Parquet file"},
      {"%PDF-1.7\n\xe2\xe3", "a PDF"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "a Git LFS pointer"}};
  for (const bool large : {false, true}) {
    for (const auto& [content, why] : cases) {
      if (large && why == "a Git LFS pointer") continue;  // they are small
      const TempFolder folder;
      // Where the end is needed, a large file is read to it.
      const std::string more = large ? std::string(5 << 20, ' ') : "";
      const Inputs paths = {folder.write("a.txt", content + more)};
      const auto report = prepare(paths, options_in(folder));
      ASSERT_FALSE(report);
      EXPECT_NE(report.error().message.find("1 not UTF-8 text ('" + paths[0].string() +
                                            "' is none: " + why),
                std::string::npos)
          << report.error().message;
    }
  }
}

// Texts of `sizes` bytes, each in a line with as much metadata as `metadata` says.
std::string documents_with_metadata(const std::vector<std::size_t>& sizes, std::size_t metadata) {
  std::string lines;
  for (const std::size_t size : sizes) {
    lines += Json({{"text", std::string(size, 't')}, {"meta", std::string(metadata, 'm')}}).dump();
    lines += "\n";
  }
  return lines;
}

TEST(PrepareInput, WhatIsHeldOutIsAShareOfTheTextNotOfTheFile) {
  const TempFolder folder;
  const Inputs paths = {folder.write("one.jsonl", documents_with_metadata({4000}, 40000))};
  const auto report = prepare(paths, options_in(folder, 0.02));
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->held_out, HeldOutKind::kEnd);
  EXPECT_EQ(report->train.tokens, 3920 + 1);
  EXPECT_EQ(report->validation.tokens, 80 + 1);
}

// Few documents of unlike sizes under any seed: some text is left to train on, and no document
// above a tenth of the text is held out whole.
TEST(PrepareInput, NoLargeDocumentIsHeldOutWhole) {
  const int samples = draws_all_samples() ? 300 : 60;
  for (std::uint64_t seed = 0; seed < static_cast<std::uint64_t>(samples); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(seed);
    const TempFolder folder;
    std::vector<std::size_t> sizes;
    for (std::uint64_t i = 0; i < 1 + rng.below(12); ++i) {
      sizes.push_back(2 + (rng.below(3) == 0 ? 1000 + rng.below(3000) : rng.below(300)));
    }
    const std::size_t metadata = rng.below(2) * rng.below(20000);
    auto options = options_in(folder, rng.below(2) == 0 ? 0.02 : 0.3);
    options.seed = seed;
    Inputs paths = {folder.write("d.jsonl", documents_with_metadata(sizes, metadata))};
    if (rng.below(2) == 0) {  // the same as files
      paths.clear();
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        paths.push_back(folder.write(fmt::format("{}.txt", i), std::string(sizes[i], 't')));
      }
    }
    const auto report = prepare(paths, options);
    ASSERT_TRUE(report) << report.error().message;
    std::size_t text = 0;
    for (const std::size_t size : sizes) text += size;
    const double most = std::max(options.validation, 0.1) * static_cast<double>(text);
    EXPECT_GT(report->train.tokens, 0);
    const auto dataset = open_dataset(options.out);
    ASSERT_TRUE(dataset) << dataset.error().message;
    if (report->held_out == HeldOutKind::kEnd) continue;
    for (std::int64_t i = 0; i < dataset->validation.documents(); ++i) {
      EXPECT_LE(static_cast<double>(dataset->validation.document(i).count - 1), most);
    }
  }
}

TEST(PrepareInput, AFilledFolderIsWrittenToOnlyToReplaceItsDataSet) {
  const TempFolder folder;
  const Inputs paths = {folder.write("in/a.txt", "some text to prepare")};
  auto options = options_in(folder);
  options.overwrite = false;
  options.out = folder.path() / "set";
  ASSERT_TRUE(prepare(paths, options));
  const std::string set = *read_file(options.out / "dataset.json");
  EXPECT_EQ(prepare(paths, options).error().message,
            "'" + options.out.string() +
                "' holds a data set of 1 documents, tokenizer bytes: wanted a new or empty folder, "
                "or to be told to overwrite the data set in it");
  folder.write("run/config.toml", "");
  folder.write("run/records/rank-0.jsonl", "");
  folder.write("run/summary.json", "{}");
  folder.write("notes/mine.txt", "");
  for (const bool overwrite : {false, true}) {
    options.overwrite = overwrite;
    options.out = folder.path() / "run";
    EXPECT_EQ(prepare(paths, options).error().message,
              "'" + options.out.string() +
                  "' holds config.toml, records, summary.json: wanted a new or empty folder");
    options.out = folder.path() / "notes";
    EXPECT_FALSE(prepare(paths, options));
    // The text itself, by its folder, the folder around it, or a file of it.
    options.out = folder.path() / "in";
    for (const Inputs& own : {Inputs{folder.path() / "in"}, {folder.path()}, paths}) {
      const auto refused = prepare(own, options);
      ASSERT_FALSE(refused);
      EXPECT_NE(refused.error().message.find("which is to be prepared"), std::string::npos)
          << refused.error().message;
    }
  }
  EXPECT_EQ(*read_file(folder.path() / "set" / "dataset.json"), set);
  options.overwrite = true;
  options.out = folder.path() / "set";
  EXPECT_TRUE(prepare(paths, options));
  // A preparation that was killed, early and late, leaves these files.
  options.out = folder.path() / "late";
  folder.write("late/train.bin", "");
  folder.write("late/train.idx", "");
  EXPECT_TRUE(prepare(paths, options));
  options.overwrite = false;
  folder.write("early/train.bin.tmp", "");
  options.out = folder.path() / "early";
  EXPECT_TRUE(prepare(paths, options));
  // A folder beside an older data set of the same text is new.
  options.out = folder.path() / "in" / "new";
  EXPECT_TRUE(prepare(Inputs{folder.path() / "in"}, options));
}

}  // namespace
}  // namespace dynmo::data
