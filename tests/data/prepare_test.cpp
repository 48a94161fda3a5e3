// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/prepare.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <map>
#include <set>

#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/core/rng.h"
#include "dynmo/data/dataset.h"
#include "dynmo/data/tokenizer.h"
#include "tests/data/prepared.h"
#include "tests/support/samples.h"
#include "tests/support/temp_folder.h"

namespace dynmo::data {
namespace {

TEST(Prepare, TakesTextByEndingInSortedOrderAndCountsTheRest) {
  const TempFolder folder;
  folder.write("in/b.txt", "bee");
  folder.write("in/a/z.py", "zed = 'é'");
  folder.write("in/a/deep/c.md", "see");
  folder.write("in/data.json", "{}");
  folder.write("in/empty.txt", "");
  folder.write("in/nul.txt", std::string_view("a\0b", 3));
  folder.write("in/latin1.txt", "caf\xe9");
  folder.write("in/.git/config.txt", "hidden");
  folder.write("in/more.jsonl.xz", "\xfd");
  const Paths paths = {folder.path() / "in"};
  const auto report = prepare(paths, options_for(folder));
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->files, 3);
  EXPECT_EQ(report->skipped_binary, 2);
  EXPECT_EQ(report->first_binary, (folder.path() / "in" / "latin1.txt").string());
  EXPECT_TRUE(report->why_binary.starts_with("byte 0xe9 at offset 3 is no UTF-8"));
  EXPECT_EQ(report->skipped_compressed, 1);
  EXPECT_EQ(report->skipped_ending, 1);
  EXPECT_EQ(report->skipped_empty, 1);
  const auto dataset = open_dataset(folder.path() / "out");
  ASSERT_TRUE(dataset) << dataset.error().message;
  EXPECT_EQ(documents_of(dataset->train), (std::vector<std::string>{"see", "zed = 'é'", "bee"}));
  EXPECT_EQ(dataset->train.tokens(), 3 + 1 + 10 + 1 + 3 + 1);
  EXPECT_EQ(dataset->validation.documents(), 0);
  EXPECT_EQ(dataset->description.vocabulary, 257);
  EXPECT_TRUE(verify(*dataset));
}

TEST(Prepare, AFileGivenByItselfIsTakenWhateverItsEnding) {
  const TempFolder folder;
  const Paths paths = {folder.write("notes", "hello")};
  ASSERT_TRUE(prepare(paths, options_for(folder)));
  EXPECT_EQ(documents_of(open_dataset(folder.path() / "out")->train),
            (std::vector<std::string>{"hello"}));
}

TEST(Prepare, EveryLineOfJsonLinesIsADocument) {
  const TempFolder folder;
  const Paths paths = {folder.write("d.jsonl",
                                    "{\"text\": \"one\\nline\", \"id\": 1}\n\n{\"text\": \"\"}\r\n"
                                    "{\"text\": \"\\u00e9\"}")};
  const auto report = prepare(paths, options_for(folder));
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->skipped_empty, 1);
  EXPECT_EQ(documents_of(open_dataset(folder.path() / "out")->train),
            (std::vector<std::string>{"one\nline", "é"}));
}

TEST(Prepare, AJsonLineWithoutItsTextIsNamed) {
  const TempFolder folder;
  const auto file = folder.write("d.jsonl", "{\"text\": \"one\"}\n{\"content\": \"two\"}\n");
  const Paths paths = {file};
  EXPECT_EQ(prepare(paths, options_for(folder)).error().message,
            file.string() + ":2: wanted an object with a string under 'text', the text key");
  folder.write("d.jsonl", "{\"content\": \"two\"}\n[1]\n");
  auto options = options_for(folder);
  options.text_key = "content";
  EXPECT_EQ(prepare(paths, options).error().code, ErrorCode::kBadInput);
  folder.write("d.jsonl", "{\"content\": \n");
  EXPECT_NE(prepare(paths, options).error().message.find("d.jsonl:1: wanted JSON"),
            std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "out" / "dataset.json"));
}

TEST(Prepare, LinksNeitherLoopNorDoubleADocument) {
  const TempFolder folder;
  folder.write("in/a.txt", "once");
  std::filesystem::create_directory_symlink(folder.path() / "in", folder.path() / "in" / "loop");
  std::filesystem::create_directory_symlink("..", folder.path() / "in" / "up");
  std::filesystem::create_symlink("a.txt", folder.path() / "in" / "b.txt");
  std::filesystem::create_symlink("nowhere", folder.path() / "in" / "c.txt");
  std::filesystem::create_symlink("d.txt", folder.path() / "in" / "d.txt");
  ASSERT_EQ(::mkfifo((folder.path() / "in" / "pipe.txt").c_str(), 0600), 0);
  const Paths paths = {folder.path() / "in", folder.path() / "in" / "a.txt"};
  const auto report = prepare(paths, options_for(folder));
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->train.documents, 1);
  EXPECT_EQ(report->skipped_twice, 2);
  EXPECT_EQ(report->skipped_other, 5);
}

TEST(Prepare, WritesTheSameBytesAgain) {
  const TempFolder folder;
  for (int i = 0; i < 100; ++i)
    folder.write(fmt::format("in/{}.txt", i), fmt::format("text {}", i));
  const Paths paths = {folder.path() / "in"};
  auto options = options_for(folder, 0.2);
  ASSERT_TRUE(prepare(paths, options));
  options.out = folder.path() / "again";
  ASSERT_TRUE(prepare(paths, options));
  for (const char* file :
       {"train.bin", "train.idx", "validation.bin", "validation.idx", "dataset.json"}) {
    EXPECT_EQ(*read_file(folder.path() / "out" / file), *read_file(options.out / file)) << file;
  }
}

TEST(Prepare, TheHeldOutDocumentsStayThoseWhenFilesAreAdded) {
  const TempFolder folder;
  const auto held_out = [&](std::uint64_t seed) {
    auto options = options_for(folder, 0.25);
    options.seed = seed;
    const Paths paths = {folder.path() / "in"};
    EXPECT_TRUE(prepare(paths, options));
    const auto dataset = open_dataset(options.out);
    const auto train = documents_of(dataset->train);
    const auto validation = documents_of(dataset->validation);
    return std::pair(std::set(train.begin(), train.end()),
                     std::set(validation.begin(), validation.end()));
  };
  const auto add = [&](int first, int last) {
    for (int i = first; i < last; ++i) {
      folder.write(fmt::format("in/{:03}.txt", (i * 37) % 1000), fmt::format("document {}", i));
    }
    std::string lines;
    for (int i = 0; i < last; ++i) lines += fmt::format("{{\"text\": \"line {}\"}}\n", i);
    folder.write("in/lines.jsonl", lines);
  };
  add(0, 200);
  const auto [train, validation] = held_out(1);
  add(200, 400);
  const auto [more_train, more_validation] = held_out(1);
  EXPECT_EQ(more_train.size() + more_validation.size(), 800U);
  for (const auto& document : train) EXPECT_TRUE(more_train.contains(document)) << document;
  for (const auto& document : validation) EXPECT_TRUE(more_validation.contains(document));
  // 25 % of 800, with a std of 12.2.
  EXPECT_NEAR(static_cast<double>(more_validation.size()), 200, 50);
  EXPECT_NE(held_out(2).second, more_validation);
}

TEST(Prepare, WithoutTextSaysWhatWasSkipped) {
  const TempFolder folder;
  folder.write("in/a.json", "{}");
  folder.write("in/b.txt", "");
  const Paths paths = {folder.path() / "in"};
  auto options = options_for(folder);
  options.endings = {".txt", ".md"};
  EXPECT_EQ(
      prepare(paths, options).error().message,
      "no text found: 1 files with other extensions, 0 compressed, 0 not UTF-8 text, 1 empty; "
      "the extensions taken are .txt,.md");
  EXPECT_TRUE(std::filesystem::is_empty(options.out));
}

TEST(Prepare, RefusesWhatCannotBeDone) {
  const TempFolder folder;
  const Paths none = {folder.path() / "none"};
  EXPECT_EQ(prepare(none, options_for(folder)).error().message,
            "'" + none[0].string() + "' is neither a file nor a folder: No such file or directory");
  EXPECT_FALSE(prepare(Paths{}, options_for(folder)));
  const Paths paths = {folder.write("a.txt", "text")};
  for (const double share : {-0.1, 1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_FALSE(prepare(paths, options_for(folder, share))) << share;
  }
  auto options = options_for(folder);
  options.endings = {"txt"};
  EXPECT_EQ(prepare(paths, options).error().message,
            "extension 'txt' is none, wanted one such as '.txt'");
  options = options_for(folder);
  options.jobs = 0;
  EXPECT_EQ(prepare(paths, options).error().message, "jobs is 0, wanted 1 to 1024");
  const Paths compressed = {folder.write("a.txt.bz2", "text")};
  EXPECT_EQ(prepare(compressed, options_for(folder)).error().message,
            "'" + compressed[0].string() +
                "' is a compressed file, wanted text or JSON lines, plain or compressed by gzip or "
                "zstd: decompress it first");
}

// All text of a split, documents back to back.
std::string joined(const std::vector<std::string>& documents) {
  std::string text;
  for (const std::string& document : documents) text += document;
  return text;
}

// Prepares and returns the documents of both splits.
struct Prepared {
  PrepareReport report;
  std::vector<std::string> train;
  std::vector<std::string> validation;
};
Prepared prepared(const TempFolder& folder, const Paths& paths, const PrepareOptions& options) {
  const auto report = prepare(paths, options);
  if (!report) {
    ADD_FAILURE() << report.error().message;
    return {};
  }
  const auto dataset = open_dataset(folder.path() / "out");
  return {*report, documents_of(dataset->train), documents_of(dataset->validation)};
}

TEST(Prepare, ASmallFolderHasADocumentHeldOut) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const TempFolder folder;
    for (int i = 0; i < 31; ++i) {
      folder.write(fmt::format("in/{}.txt", i), fmt::format("text number {}", i));
    }
    auto options = options_for(folder, 1e-6);
    options.seed = seed;
    const Prepared made = prepared(folder, {folder.path() / "in"}, options);
    EXPECT_EQ(made.report.held_out, HeldOutKind::kDocument);
    ASSERT_EQ(made.validation.size(), 1U);
    EXPECT_EQ(made.train.size(), 30U);
    EXPECT_EQ(made.validation[0], "text number " + made.report.held_out_name.substr(
                                                       0, made.report.held_out_name.find('.')));
    options.validation = 0.5;
    const Prepared drawn = prepared(folder, {folder.path() / "in"}, options);
    EXPECT_EQ(drawn.report.held_out, HeldOutKind::kDrawn);
    EXPECT_NE(std::ranges::find(drawn.validation, made.validation[0]), drawn.validation.end())
        << "a larger share holds out more, never others";
  }
}

TEST(Prepare, OfOneDocumentTheEndIsHeldOut) {
  const TempFolder folder;
  std::string lines;
  for (int i = 0; i < 500; ++i) lines += fmt::format("line {:03} é\n", i);
  std::string one_line;
  while (one_line.size() < 9 << 20) one_line += "wörds ";  // several pieces
  const auto shares =
      draws_all_samples() ? std::vector<double>{0.02, 0.3, 0.999999} : std::vector<double>{0.3};
  for (const std::string& text : {lines, one_line, std::string("éé"), std::string("ab")}) {
    for (const double share : shares) {
      const Paths paths = {folder.write("book.txt", text)};
      const Prepared made = prepared(folder, paths, options_for(folder, share));
      EXPECT_EQ(made.report.held_out, HeldOutKind::kEnd);
      ASSERT_EQ(made.train.size(), 1U);
      ASSERT_EQ(made.validation.size(), 1U);
      EXPECT_EQ(made.train[0] + made.validation[0], text);
      EXPECT_FALSE(made.train[0].empty());
      EXPECT_FALSE(made.validation[0].empty());
      EXPECT_NE(static_cast<unsigned char>(made.validation[0][0]) & 0xC0, 0x80) << "a whole letter";
      if (text.size() < 100) continue;
      EXPECT_NEAR(static_cast<double>(made.validation[0].size()),
                  share * static_cast<double>(text.size()),
                  20 + share * static_cast<double>(text.size()) / 2);
      EXPECT_TRUE(text != lines || made.train[0].ends_with('\n'));
    }
  }
  // A line of JSON lines is a document, too, of whatever size.
  const Paths paths = {folder.write("d.jsonl", "{\"text\": \"" + one_line + "\"}\n")};
  const Prepared made = prepared(folder, paths, options_for(folder, 0.25));
  EXPECT_EQ(joined(made.train) + joined(made.validation), one_line);
  EXPECT_EQ(made.validation.size(), 1U);
}

TEST(Prepare, WhereOneDocumentIsMostOfTheTextItsEndIsHeldOut) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    const TempFolder folder;
    folder.write("in/book.txt", std::string(10000, 'b'));
    folder.write("in/larger.txt", std::string(12000, 'l'));
    auto options = options_for(folder, 0.02);
    options.seed = seed;
    const Prepared made = prepared(folder, {folder.path() / "in"}, options);
    EXPECT_EQ(made.report.held_out, HeldOutKind::kEnd);
    EXPECT_EQ(made.report.held_out_name, "larger.txt");
    EXPECT_EQ(made.validation, std::vector<std::string>{std::string(240, 'l')});
  }
}

TEST(Prepare, WhatCannotBeCutIsTrainedOn) {
  const TempFolder folder;
  for (const std::string text : {"a", "é"}) {
    const Paths paths = {folder.write("a.txt", text)};
    const Prepared made = prepared(folder, paths, options_for(folder, 0.02));
    EXPECT_EQ(made.report.held_out, HeldOutKind::kNothing);
    EXPECT_EQ(made.train, std::vector<std::string>{text});
    EXPECT_TRUE(made.validation.empty());
  }
}

TEST(Prepare, TellsItsProgress) {
  const TempFolder folder;
  std::string lines;
  while (lines.size() < 5U << 20) lines += "{\"text\": \"a line\"}\n";
  const Paths paths = {folder.write("d.jsonl", lines)};
  auto options = options_for(folder);
  std::vector<PrepareProgress> told;
  options.progress = [&](const PrepareProgress& progress) { told.push_back(progress); };
  ASSERT_TRUE(prepare(paths, options));
  ASSERT_GE(told.size(), 5U);
  for (std::size_t i = 0; i < told.size(); ++i) {
    EXPECT_EQ(told[i].total_bytes, static_cast<std::int64_t>(lines.size()));
    EXPECT_TRUE(i == 0 || told[i].documents > told[i - 1].documents);
  }
  EXPECT_EQ(told.back().bytes, told.back().total_bytes);
}

// Files of all kinds: many small ones, one that is cut into pieces with and one without line ends,
// JSON lines of several blocks with a line longer than a block, damaged ones.
void write_mixture(const TempFolder& folder, std::size_t large = 4300U << 10) {
  Rng rng(35);
  const auto words = [&](std::size_t bytes, char between) {
    std::string text;
    while (text.size() < bytes) {
      for (std::uint64_t letters = 1 + rng.below(8); letters > 0; --letters) {
        text += static_cast<char>('a' + rng.below(6));
      }
      text += rng.below(9) == 0 ? "\xC3\xA9" : "";
      text += rng.below(12) == 0 ? between : ' ';
    }
    return text;
  };
  for (int i = 0; i < 300; ++i) {
    folder.write(fmt::format("in/small/{}.txt", i), words(rng.below(4000), '\n'));
  }
  folder.write("in/large.txt", words(large + 200000, '\n'));
  folder.write("in/one_line.txt", words(large, ' '));
  folder.write("in/nearly.txt", words(large, '\n') + "\xff");
  folder.write("in/damaged.txt", "\xff");
  std::string lines;
  for (int i = 0; i < 2000; ++i) {
    const std::size_t size = i == 700 ? 1200U << 10 : rng.below(600);
    lines += Json({{"text", words(size, '\n')}, {"id", i}}).dump() + (i % 3 == 0 ? "\n\n" : "\n");
  }
  folder.write("in/lines.jsonl", lines + "{\"text\": \"the last, without an end\"}");
}

// One, a few, and more than there are processors.
std::vector<int> numbers_of_jobs() {
  return draws_all_samples() ? std::vector<int>{1, 2, 7} : std::vector<int>{1, 7};
}

class PrepareJobs : public testing::TestWithParam<const char*> {};

TEST_P(PrepareJobs, AnyNumberOfThemWritesTheSameBytes) {
  const TempFolder folder;
  // SentencePiece takes its time; what is cut into pieces is so for bytes, too.
  write_mixture(folder, std::string(GetParam()) == "bytes" ? 4300U << 10 : 300U << 10);
  const Paths paths = {folder.path() / "in"};
  std::map<std::string, std::string> first;
  for (const int jobs : numbers_of_jobs()) {
    auto options = options_for(folder, 0.1);
    options.jobs = jobs;
    options.tokenizer = GetParam();
    options.training.vocabulary = 400;
    options.training_bytes = 1 << 18;
    const auto report = prepare(paths, options);
    ASSERT_TRUE(report) << report.error().message;
    EXPECT_EQ(report->skipped_binary, 2);
    EXPECT_GT(report->validation.documents, 100);
    for (const auto& entry : std::filesystem::directory_iterator(options.out)) {
      const std::string bytes = *read_file(entry.path());
      const auto [place, added] = first.emplace(entry.path().filename().string(), bytes);
      EXPECT_EQ(added, jobs == 1) << entry.path();
      EXPECT_TRUE(place->second == bytes) << entry.path() << " by " << jobs << " jobs";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(OfTokenizer, PrepareJobs, testing::Values("bytes", "sentencepiece"));

TEST(Prepare, CutsLongDocumentsAndLosesNothing) {
  const TempFolder folder;
  write_mixture(folder);
  const auto tokenizers = draws_all_samples() ? std::vector<const char*>{"bytes", "sentencepiece"}
                                              : std::vector<const char*>{"bytes"};
  for (const char* tokenizer : tokenizers) {
    auto options = options_for(folder);
    options.jobs = 2;
    options.tokenizer = tokenizer;
    options.training.vocabulary = 400;
    options.training_bytes = 1 << 18;
    const Paths paths = {folder.path() / "in" / "large.txt", folder.path() / "in" / "one_line.txt",
                         folder.path() / "in" / "lines.jsonl"};
    const auto report = prepare(paths, options);
    ASSERT_TRUE(report) << report.error().message;
    EXPECT_EQ(report->files, 3);
    const auto dataset = open_dataset(options.out);
    ASSERT_TRUE(dataset) << dataset.error().message;
    const auto reader = tokenizer_of(options.out, dataset->description);
    ASSERT_TRUE(reader) << reader.error().message;
    const auto documents = documents_of(dataset->train, **reader);
    EXPECT_TRUE(documents[0] == *read_file(paths[0])) << tokenizer;
    EXPECT_TRUE(documents[1] == *read_file(paths[1])) << tokenizer;
    EXPECT_EQ(documents.back(), "the last, without an end");
  }
}

TEST(Prepare, OfSeveralFaultsTheFirstIsToldWhateverTheJobs) {
  const TempFolder folder;
  std::string lines;
  for (int i = 0; i < 200000; ++i) {
    lines += i == 60000 || i == 150000 ? "{}\n" : "{\"text\": \"a line\"}\n";
  }
  const Paths paths = {folder.write("d.jsonl", lines), folder.write("e.jsonl", "[]")};
  for (const int jobs : numbers_of_jobs()) {
    auto options = options_for(folder);
    options.jobs = jobs;
    const auto report = prepare(paths, options);
    ASSERT_FALSE(report);
    EXPECT_NE(report.error().message.find("d.jsonl:60001: wanted"), std::string::npos)
        << report.error().message;
  }
}

TEST(Prepare, TrainsATokenizerThatTheFolderKeeps) {
  const TempFolder folder;
  write_mixture(folder, 0);
  const Paths paths = {folder.path() / "in" / "small"};
  auto options = options_for(folder, 0.1);
  options.tokenizer = "sentencepiece";
  options.training.vocabulary = 350;
  ASSERT_TRUE(prepare(paths, options));
  const auto dataset = open_dataset(options.out);
  ASSERT_TRUE(dataset) << dataset.error().message;
  EXPECT_EQ(dataset->description.vocabulary, 350);
  EXPECT_EQ(dataset->description.end_of_document, 2);
  EXPECT_EQ(dataset->train.type(), TokenType::kUint16);

  // The same ids by its file as by its folder.
  auto again = options;
  again.out = folder.path() / "again";
  again.tokenizer = (options.out / "tokenizer.model").string();
  ASSERT_TRUE(prepare(paths, again));
  EXPECT_EQ(*read_file(options.out / "train.bin"), *read_file(again.out / "train.bin"));
  EXPECT_EQ(*read_file(options.out / "tokenizer.model"), *read_file(again.out / "tokenizer.model"));

  folder.write("again/tokenizer.model", *read_file(options.out / "tokenizer.model") + " ");
  const auto changed = tokenizer_of(again.out, dataset->description);
  ASSERT_FALSE(changed);
  EXPECT_NE(changed.error().message.find("not the tokenizer"), std::string::npos);

  // Bytes again: no tokenizer that nobody tells of is left behind.
  again.tokenizer = "bytes";
  ASSERT_TRUE(prepare(paths, again));
  EXPECT_FALSE(std::filesystem::exists(again.out / "tokenizer.model"));
}

}  // namespace
}  // namespace dynmo::data
