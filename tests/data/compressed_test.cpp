// SPDX-License-Identifier: Apache-2.0
// Text that is compressed by gzip and zstd.
#include "tests/support/compressed.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/core/rng.h"
#include "dynmo/data/corpus_impl.h"
#include "dynmo/data/prepare.h"
#include "dynmo/data/text_stream.h"
#include "tests/support/mutate.h"
#include "tests/support/temp_folder.h"

namespace dynmo::data {
namespace {

using Places = std::vector<std::filesystem::path>;
using std::string_literals::operator""s;

// A frame that decoders pass over, as pzstd writes one before each frame.
const std::string kSkippable = "\x50\x2a\x4d\x18\x04\x00\x00\x00\x10\x00\x00\x00"s;

std::string prose(Rng& rng, std::size_t bytes) {
  std::string text;
  while (text.size() < bytes) {
    for (std::uint64_t word = rng.below(300) * 7919 + 1; word > 0; word /= 7) {
      text += "abcdefgh"[word % 7];
    }
    text += rng.below(9) == 0 ? " é\n" : " ";
  }
  return text;
}

std::string json_lines(Rng& rng, int count) {
  std::string lines;
  for (int i = 0; i < count; ++i) lines += Json({{"text", prose(rng, 40)}}).dump() + "\n";
  return lines;
}

// Cuts a text in up to four parts, compressed one by one.
std::string in_parts(std::string_view text, Rng& rng, bool zstd) {
  std::string bytes = zstd && rng.below(2) == 0 ? kSkippable : "";
  for (int part = 0; part < 3; ++part) {
    const auto size = static_cast<std::size_t>(rng.below(text.size() + 1));
    bytes += zstd ? zstd_of(text.substr(0, size)) : gzip_of(text.substr(0, size));
    text.remove_prefix(size);
  }
  return bytes + (zstd ? zstd_of(text) : gzip_of(text));
}

// Returns the files of the data set that is prepared from the folder, by name.
std::map<std::string, std::string> data_set_of(const TempFolder& folder, const std::string& in,
                                               PrepareOptions options) {
  options.out = folder.path() / "out";
  options.overwrite = true;
  options.validation = 0.1;
  const Places paths = {folder.path() / in};
  const auto report = prepare(paths, options);
  EXPECT_TRUE(report) << report.error().message;
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(options.out)) {
    files[entry.path().filename().string()] = *read_file(entry.path());
  }
  return files;
}

// Reads all of a file, by pieces of drawn sizes.
Expected<std::string> read_all(const std::filesystem::path& path, Rng& rng) {
  DYNMO_ASSIGN(TextStream stream, TextStream::open(path));
  std::string text;
  while (true) {
    std::string piece(1 + rng.below(rng.below(2) == 0 ? 7 : 200000), '\0');
    DYNMO_ASSIGN(const std::size_t count, stream.read(piece));
    text += piece.substr(0, count);
    if (count < piece.size()) return text;
  }
}

std::string refusal(const std::string& bytes) {
  const TempFolder folder;
  Rng rng(1);
  const auto read = read_all(folder.write("a.txt.gz", bytes), rng);
  if (read) return "";
  const std::string& message = read.error().message;
  const std::size_t at = message.find("of its text: ");
  EXPECT_NE(message.find("a.txt.gz'"), std::string::npos) << message;
  if (at == std::string::npos) return message;
  return message.substr(at + 13, message.find(';') - at - 13);
}

TEST(Compressed, GivesTheBytesThatTheTextGives) {
  const TempFolder folder;
  Rng rng(3);
  std::map<std::string, std::string> texts = {
      {"a.jsonl", json_lines(rng, 400)},     {"b.txt", prose(rng, kPieceBytes + 100000)},
      {"b.txt-2.txt", prose(rng, 3000)},     {"c.md", prose(rng, 200)},
      {"deep/d.ndjson", json_lines(rng, 9)}, {"deep/e.txt", ""}};
  for (const auto& [name, text] : texts) {
    folder.write("plain/" + name, text);
    folder.write("gzip/" + name + ".gz", in_parts(text, rng, false));
    folder.write("zstd/" + name + ".ZST", in_parts(text, rng, true));
    const int kind = static_cast<int>(rng.below(3));
    folder.write("mixed/" + name + (kind == 1 ? ".gz" : ""),
                 kind == 0 ? text : in_parts(text, rng, kind == 2));
  }
  for (const char* tokenizer : {"bytes", "sentencepiece"}) {
    PrepareOptions options;
    options.tokenizer = tokenizer;
    options.training.vocabulary = 400;
    options.training_bytes = 200000;
    const auto wanted = data_set_of(folder, "plain", options);
    EXPECT_GE(wanted.size(), 5);
    for (const char* in : {"gzip", "zstd", "mixed"}) {
      for (const int jobs : {1, 3}) {
        if (jobs == 3 && options.tokenizer == "sentencepiece") continue;
        options.jobs = jobs;
        EXPECT_TRUE(data_set_of(folder, in, options) == wanted) << in << " " << jobs;
      }
    }
    options.jobs = 1;
  }
}

TEST(Compressed, IsDecidedByContent) {
  const std::string lines = "{\"text\": \"one\"}\n{\"text\": \"two\"}\n";
  for (const char* name : {"a.jsonl.gz", "a.json.gz", "a.txt.gz", "a.gz", "a.jsonl", "a.jsonl.zst",
                           "a.ndjson.ZST", "a"}) {
    for (const std::string& bytes : {lines, gzip_of(lines), zstd_of(lines)}) {
      const TempFolder folder;
      PrepareOptions options{.out = folder.path() / "out", .validation = 0};
      const Places paths = {folder.write(name, bytes)};
      const auto report = prepare(paths, options);
      ASSERT_TRUE(report) << report.error().message;
      EXPECT_EQ(report->train.documents, 2) << name;
      EXPECT_EQ(report->bytes, std::ssize(lines));
    }
  }
  EXPECT_EQ(compression_of("P*M no frame"), Compression::kNone);
  EXPECT_EQ(compression_of(kSkippable + "text"), Compression::kNone);
  EXPECT_EQ(compression_of(kSkippable + kSkippable + zstd_of("")), Compression::kZstd);
}

TEST(Compressed, WhatIsNoTextInsideIsNamed) {
  const TempFolder folder;
  PrepareOptions options{.out = folder.path() / "out", .validation = 0};
  for (const std::string& bytes : {gzip_of("a\0b"s), zstd_of(std::string(5 << 20, ' ') + '\0')}) {
    const Places paths = {folder.write("a.txt.gz", bytes)};
    const auto report = prepare(paths, options);
    ASSERT_FALSE(report);
    EXPECT_NE(report.error().message.find("a.txt.gz' is none: binary, with a NUL byte"),
              std::string::npos)
        << report.error().message;
  }
}

TEST(Compressed, IsReadInPiecesOfAnySize) {
  Rng rng(5);
  for (int sample = 0; sample < 40; ++sample) {
    SCOPED_TRACE(sample);
    const std::string text = prose(rng, rng.below(2) == 0 ? rng.below(300) : rng.below(600000));
    const TempFolder folder;
    const auto path = folder.write("a", in_parts(text, rng, sample % 2 == 0));
    const auto read = read_all(path, rng);
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_TRUE(*read == text);
  }
}

TEST(Compressed, ZerosBehindGzipArePaddingAndNothingElseIs) {
  const std::string member = gzip_of("text");
  EXPECT_EQ(refusal(member + std::string(70000, '\0')), "");
  EXPECT_EQ(refusal(member + "more"), "its end is no gzip");
  EXPECT_EQ(refusal(zstd_of("text") + "more"), "Unknown frame descriptor");
}

TEST(Compressed, EveryTruncationIsRefused) {
  Rng rng(7);
  const std::string text = prose(rng, 900);
  for (const std::string& whole : {gzip_of(text), zstd_of(text)}) {
    for (std::size_t size = 4; size < whole.size(); ++size) {
      EXPECT_EQ(refusal(whole.substr(0, size)), "it ends early") << size;
    }
    // Inside the second part, too.
    EXPECT_EQ(refusal(whole + whole.substr(0, whole.size() / 2)), "it ends early");
  }
}

TEST(Compressed, DamageIsRefusedOrDoesNotReachTheText) {
  Rng rng(11);
  const std::string text = prose(rng, 20000);
  int refused = 0;
  for (int sample = 0; sample < 300; ++sample) {
    SCOPED_TRACE(sample);
    const std::string bytes = mutate(in_parts(text, rng, sample % 2 == 0), rng);
    const TempFolder folder;
    PrepareOptions options{.out = folder.path() / "out", .validation = 0};
    const Places paths = {folder.write("a.txt", bytes)};
    const auto report = prepare(paths, options);
    if (report) continue;
    ++refused;
    EXPECT_EQ(report.error().code, ErrorCode::kBadInput);
    EXPECT_NE(report.error().message.find("a.txt'"), std::string::npos) << report.error().message;
    EXPECT_EQ(report.error().message.find('\n'), std::string::npos);
    EXPECT_FALSE(std::filesystem::exists(options.out / "dataset.json"));
  }
  EXPECT_GT(refused, 200);
}

}  // namespace
}  // namespace dynmo::data
