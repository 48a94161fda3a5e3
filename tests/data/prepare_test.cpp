// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/prepare.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <map>
#include <set>

#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "dynmo/data/dataset.h"
#include "dynmo/data/tokenizer.h"
#include "tests/support/mutate.h"
#include "tests/support/temp_folder.h"

namespace dynmo::data {
namespace {

using Paths = std::vector<std::filesystem::path>;

std::vector<std::string> documents_of(const TokenShard& shard) {
  std::vector<std::string> documents;
  for (std::int64_t i = 0; i < shard.documents(); ++i) {
    const auto range = shard.document(i);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(range.count));
    shard.read(range.first, tokens);
    EXPECT_EQ(tokens.back(), kEndOfDocument);
    tokens.pop_back();
    documents.push_back(decode_bytes(tokens));
  }
  return documents;
}

PrepareOptions options_for(const TempFolder& folder, double validation = 0) {
  PrepareOptions options;
  options.out = folder.path() / "out";
  options.validation = validation;
  return options;
}

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
  const Paths paths = {folder.path() / "in"};
  const auto report = prepare(paths, options_for(folder));
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->files, 3);
  EXPECT_EQ(report->skipped_binary, 2);
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
  EXPECT_EQ(
      prepare(paths, options_for(folder)).error().message,
      file.string() + ":2: wanted an object with a string under 'text' (--text-key names another)");
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
  // 25 % of 800 with a deviation of 12.2.
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
  EXPECT_EQ(prepare(paths, options).error().message,
            "no text found: 1 files of other endings, 0 binary, 1 empty; the endings taken are "
            ".txt,.md (--endings)");
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
            "ending 'txt' is none, wanted one such as '.txt'");
  options = options_for(folder, 0.999999);
  EXPECT_EQ(prepare(paths, options).error().message,
            "all 1 documents are held out: give more text, or less --validation than 0.999999");
}

TEST(Prepare, AFailureLeavesTheOlderDataSetWhole) {
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

TEST(Prepare, AnOpenDataSetOutlivesItsReplacement) {
  const TempFolder folder;
  const Paths paths = {folder.write("a.txt", std::string(100000, 'o'))};
  ASSERT_TRUE(prepare(paths, options_for(folder)));
  const auto before = open_dataset(folder.path() / "out");
  folder.write("a.txt", "short");
  ASSERT_TRUE(prepare(paths, options_for(folder)));
  EXPECT_EQ(documents_of(before->train)[0], std::string(100000, 'o'));
}

TEST(Prepare, TellsItsProgress) {
  const TempFolder folder;
  std::string lines;
  for (int i = 0; i < 5000; ++i) lines += "{\"text\": \"a line\"}\n";
  const Paths paths = {folder.write("d.jsonl", lines)};
  auto options = options_for(folder);
  std::int64_t last = 0;
  int calls = 0;
  options.progress = [&](const PrepareProgress& progress) {
    EXPECT_GT(progress.documents, last);
    last = progress.documents;
    ++calls;
  };
  ASSERT_TRUE(prepare(paths, options));
  EXPECT_EQ(calls, 4);
}

TEST(Dataset, NoticesFilesThatAreNotThoseOfItsDescription) {
  const TempFolder folder;
  const Paths paths = {folder.write("a.txt", "some text")};
  ASSERT_TRUE(prepare(paths, options_for(folder)));
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

TEST(Tokenizer, BytesComeBack) {
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
  std::vector<std::uint16_t> tokens;
  encode_bytes(text, tokens);
  EXPECT_EQ(tokens.size(), 256U);
  EXPECT_EQ(decode_bytes(std::vector<std::int32_t>(tokens.begin(), tokens.end())), text);
}

// Oracle: the code points of RFC 3629, encoded by hand, and everything else of up to four bytes by
// sampling.
bool decodes(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto byte = [&](std::size_t k) -> std::uint32_t {
      return i + k < text.size() ? static_cast<unsigned char>(text[i + k]) : 0;
    };
    const std::uint32_t lead = byte(0);
    const std::size_t length = lead < 0x80             ? 1
                               : (lead & 0xE0) == 0xC0 ? 2
                               : (lead & 0xF0) == 0xE0 ? 3
                               : (lead & 0xF8) == 0xF0 ? 4
                                                       : 0;
    if (length == 0 || lead == 0) return false;
    std::uint32_t point = length == 1 ? lead : lead & (0xFFU >> (length + 1));
    for (std::size_t k = 1; k < length; ++k) {
      if ((byte(k) & 0xC0) != 0x80) return false;
      point = point << 6 | (byte(k) & 0x3F);
    }
    constexpr std::uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
    if (point < kSmallest[length] || point > 0x10FFFF) return false;
    if (point >= 0xD800 && point < 0xE000) return false;
    i += length;
  }
  return true;
}

TEST(TextCheck, AcceptsUtf8AndNothingElseHoweverItIsCut) {
  Rng rng(34);
  int accepted = 0;
  for (int i = 0; i < 300000; ++i) {
    std::string text;
    const auto size = 1 + rng.below(5);
    for (std::uint64_t k = 0; k < size; ++k) {
      // Mostly leads and continuations near their bounds: random bytes are nearly never valid.
      constexpr unsigned char kBytes[] = {0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF,
                                          0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED,
                                          0xEE, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5};
      text += static_cast<char>(rng.below(8) == 0 ? rng.below(256) : kBytes[rng.below(20)]);
    }
    TextCheck check;
    const auto cut = static_cast<std::size_t>(rng.below(size + 1));
    check.feed(std::string_view(text).substr(0, cut));
    check.feed(std::string_view(text).substr(cut));
    ASSERT_EQ(check.is_text(), decodes(text)) << i;
    accepted += check.is_text() ? 1 : 0;
  }
  EXPECT_GT(accepted, 5000);
}

}  // namespace
}  // namespace dynmo::data
