// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "dynmo/core/rng.h"
#include "dynmo/data/sentence_piece.h"
#include "tests/support/mutate.h"
#include "tests/support/temp_folder.h"

namespace dynmo::data {
namespace {

std::vector<std::string> some_lines() {
  std::vector<std::string> words = {"the", "layer", "f(x)", "été", "42"};
  Rng rng(36);
  while (words.size() < 300) {
    std::string word;
    for (auto n = 2 + rng.below(6); n > 0; --n) word += static_cast<char>('a' + rng.below(26));
    words.push_back(word);
  }
  std::vector<std::string> lines;
  for (int i = 0; i < 2000; ++i) {
    std::string line(rng.below(3) * 2, ' ');
    for (std::uint64_t n = 1 + rng.below(10); n > 0; --n)
      line += words[rng.below(1 + rng.below(words.size()))] + " ";
    lines.push_back(line);
  }
  return lines;
}

std::unique_ptr<const Tokenizer> trained(const SentencePieceOptions& options) {
  const auto model = train_sentence_piece(some_lines(), options);
  EXPECT_TRUE(model) << model.error().message;
  auto tokenizer = read_sentence_piece(*model, "it");
  EXPECT_TRUE(tokenizer) << tokenizer.error().message;
  return std::move(*tokenizer);
}

std::string there_and_back(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<std::int32_t> tokens;
  tokenizer.encode(text, tokens);
  for (const std::int32_t token : tokens) {
    EXPECT_GE(token, 0);
    EXPECT_LT(token, tokenizer.vocabulary());
    EXPECT_NE(token, tokenizer.end_of_document());
  }
  return decode(tokenizer, tokens);
}

TEST(ByteTokenizer, GivesBytesBack) {
  const auto tokenizer = make_byte_tokenizer();
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
  std::vector<std::int32_t> tokens;
  tokenizer->encode(text, tokens);
  EXPECT_EQ(tokens.size(), 256U);
  EXPECT_EQ(tokens[200], 200);
  EXPECT_EQ(decode(*tokenizer, tokens), text);
  EXPECT_EQ(tokenizer->text_of(256), "");
  EXPECT_EQ(tokenizer->text_of(-1), "");
}

TEST(SentencePiece, GivesAnyTextBack) {
  for (const char* algorithm : {"bpe", "unigram"}) {
    const auto tokenizer = trained({.vocabulary = 400, .algorithm = algorithm});
    EXPECT_EQ(tokenizer->vocabulary(), 400);
    EXPECT_FALSE(tokenizer->adds_space());
    for (const std::string text :
         {"", "a", " a", "  the  layer \n\n\tmoves  ", "\r\n", "\xF0\x9F\x8E\x89 \xE6\xBC\xA2",
          "<s> </s> <0x41>", "x\n", "1234567"}) {
      EXPECT_EQ(there_and_back(*tokenizer, text), text) << algorithm;
    }
    Rng rng(37);
    for (int i = 0; i < 2000; ++i) {
      std::string text;
      for (auto n = rng.below(30); n > 0; --n) {
        constexpr std::string_view kSome[] = {"the", " ", "\n", "é", "漢", "🎉", "Z", "9", "_"};
        text += kSome[rng.below(9)];
      }
      ASSERT_EQ(there_and_back(*tokenizer, text), text) << algorithm;
    }
  }
}

TEST(SentencePiece, SpellsWhatItLacksInBytesThatComeOneByOne) {
  const auto tokenizer = trained({.vocabulary = 400});
  std::vector<std::int32_t> tokens;
  tokenizer->encode("🎉", tokens);
  ASSERT_GE(tokens.size(), 4U);
  std::string text;
  for (const std::int32_t token : tokens) {
    EXPECT_EQ(tokenizer->text_of(token).size(), 1U);
    text += tokenizer->text_of(token);
  }
  EXPECT_EQ(text, "🎉");
}

TEST(SentencePiece, UsesFewerTokensThanBytes) {
  const auto tokenizer = trained({.vocabulary = 400});
  std::string text;
  for (const std::string& line : some_lines()) text += line + "\n";
  std::vector<std::int32_t> tokens;
  tokenizer->encode(text, tokens);
  EXPECT_LT(tokens.size() * 3, text.size() * 2);
}

// Text that is tokenized in pieces is cut behind the ends of lines.
TEST(SentencePiece, OfLinesAreTheTokensOfTheText) {
  const auto tokenizer = trained({.vocabulary = 400});
  std::vector<std::int32_t> whole;
  std::vector<std::int32_t> lines;
  std::string text;
  for (const std::string& line : some_lines()) {
    tokenizer->encode(line + "\n", lines);
    text += line + "\n";
  }
  tokenizer->encode(text, whole);
  EXPECT_EQ(whole, lines);
}

// A text in one line is cut before the spaces in front of a word, so that it takes no more memory.
TEST(SentencePiece, OfWordsAreTheTokensOfALongLine) {
  const std::vector<std::string> lines = some_lines();
  for (const char* algorithm : {"bpe", "unigram"}) {
    const SentencePieceOptions options{.vocabulary = 400, .algorithm = algorithm};
    const auto tokenizer = trained(options);
    std::vector<std::int32_t> whole;
    std::vector<std::int32_t> words;
    std::string text = "x";
    std::string word = "x";
    Rng rng(7);
    while (text.size() < 200000) {
      for (const char c : " " + lines[rng.below(20)]) {
        if (c == ' ' && word.back() != ' ') {
          tokenizer->encode(word, words);
          word.clear();
        }
        (word += c, text += c);
      }
    }
    tokenizer->encode(word, words);
    tokenizer->encode(text, whole);
    // (The sums of unigram's scores are floats: over a long text they decide some ties otherwise.)
    if (options.algorithm == "bpe") {
      EXPECT_EQ(whole, words);
    }
    EXPECT_EQ(decode(*tokenizer, whole), text);
  }
}

TEST(SentencePiece, GivesATextWithoutSpacesBack) {
  const auto tokenizer = trained({.vocabulary = 400});
  std::string text;
  for (Rng rng(3); text.size() < 700000;) text += rng.below(3) == 0 ? "\u00e9" : "ab";
  EXPECT_EQ(there_and_back(*tokenizer, text), text);
}

TEST(SentencePiece, TrainsOnABoundedNumberOfDifferentWords) {
  std::vector<std::string> lines = some_lines();  // of few words
  EXPECT_EQ(limit_words(lines, 1 << 20), 0);
  EXPECT_EQ(lines, some_lines());
  std::vector<std::string> different;
  for (int i = 0; i < 1000; ++i) different.push_back(fmt::format("{:0>100}", i));
  std::vector<std::string> fewer = different;
  EXPECT_EQ(limit_words(fewer, 20000), 800);
  EXPECT_EQ(fewer.size(), 200U);
  EXPECT_TRUE(std::ranges::is_sorted(fewer));
  EXPECT_GT(fewer.back(), different[900]) << "lines of the whole text";
  std::vector<std::string> again = different;
  EXPECT_EQ(limit_words(again, 20000), 800);
  EXPECT_EQ(fewer, again);
}

TEST(SentencePiece, TrainsTheSameModelAgain) {
  for (const char* algorithm : {"bpe", "unigram"}) {
    const SentencePieceOptions options{.vocabulary = 400, .algorithm = algorithm};
    EXPECT_EQ(*train_sentence_piece(some_lines(), options),
              *train_sentence_piece(some_lines(), options));
  }
}

TEST(SentencePiece, SaysWhatCannotBeTrained) {
  const auto message = [](std::vector<std::string> lines, const SentencePieceOptions& options) {
    testing::internal::CaptureStderr();
    const auto model = train_sentence_piece(std::move(lines), options);
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "the library spoke";
    EXPECT_FALSE(model);
    return model.error().message;
  };
  EXPECT_EQ(message({}, {}), "no text to train a tokenizer on: give more text");
  EXPECT_EQ(message({" ", "\t"}, {}), "no text to train a tokenizer on: give more text");
  EXPECT_EQ(message({"text"}, {.vocabulary = 300, .algorithm = "word"}),
            "algorithm is 'word', wanted bpe or unigram");
  EXPECT_NE(message({"text"}, {.vocabulary = 260}).find("wanted more than the 260"),
            std::string::npos);
  for (const char* algorithm : {"bpe", "unigram"}) {
    const std::string large = message(some_lines(), {.vocabulary = 30000, .algorithm = algorithm});
    EXPECT_EQ(large.find("vocabulary is 30000, more than this text has pieces for: wanted "), 0U)
        << large;
    const std::string small = message({"abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ"},
                                      {.vocabulary = 270, .algorithm = algorithm});
    EXPECT_EQ(small.find("vocabulary is 270, too small for the characters"), 0U) << small;
  }
}

TEST(SentencePiece, ThatIsNoneIsRefusedInOneLine) {
  const auto model = train_sentence_piece(some_lines(), {.vocabulary = 300});
  ASSERT_TRUE(model);
  testing::internal::CaptureStderr();
  EXPECT_NE(read_sentence_piece("", "f").error().message.find("'f' is not a SentencePiece model"),
            std::string::npos);
  EXPECT_NE(read_sentence_piece("some text", "f").error().message.find("is not a"),
            std::string::npos);
  for (std::size_t size = 0; size < model->size(); size += 97) {
    (void)read_sentence_piece(model->substr(0, size), "f");
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "the library spoke";
}

TEST(Tokenizer, IsOpenedByNameFileAndFolder) {
  const TempFolder folder;
  const auto model = train_sentence_piece(some_lines(), {.vocabulary = 300});
  ASSERT_TRUE(model);
  const auto file = folder.write("tokenizer.model", *model);
  EXPECT_EQ((*open_tokenizer("bytes"))->kind(), "bytes");
  EXPECT_EQ((*open_tokenizer(file.string()))->vocabulary(), 300);
  EXPECT_EQ((*open_tokenizer(folder.path().string()))->vocabulary(), 300);
  const auto none = open_tokenizer("nowhere.model");
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().message,
            "tokenizer 'nowhere.model' is not there, wanted bytes, a SentencePiece model such as "
            "tokenizer.model, a tokenizer.json, or a folder with one");
}

}  // namespace
}  // namespace dynmo::data
