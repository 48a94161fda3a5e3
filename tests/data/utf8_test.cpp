// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/utf8.h"

#include <gtest/gtest.h>

#include "dynmo/core/rng.h"

namespace dynmo::data {
namespace {

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

TEST(WholeCharacters, OfTextAreTheTextHoweverItIsCut) {
  const std::string text = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x8E\x89z";
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    WholeCharacters characters;
    const std::string first = characters.feed(std::string_view(text).substr(0, cut));
    TextCheck check;
    check.feed(first);
    EXPECT_TRUE(check.is_text()) << cut;
    EXPECT_EQ(first, text.substr(0, first.size()));
    EXPECT_EQ(first.size() + incomplete_tail(std::string_view(text).substr(0, cut)), cut);
    EXPECT_EQ(first + characters.feed(std::string_view(text).substr(cut)), text);
    EXPECT_EQ(characters.finish(), "");
  }
}

// The examples of the Unicode standard's section 3.9, "U+FFFD substitution of maximal subparts".
TEST(WholeCharacters, ReplaceWhatIsNone) {
  const auto whole = [](std::string_view bytes) {
    WholeCharacters characters;
    std::string text;
    for (const char c : bytes) text += characters.feed({&c, 1});
    return text + characters.finish();
  };
  const std::string bad = "\xEF\xBF\xBD";
  EXPECT_EQ(whole("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"),
            bad + bad + bad + bad + bad + bad + bad + bad + "A");
  EXPECT_EQ(whole("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"),
            bad + bad + bad + bad + bad + bad + bad + bad + "A");
  EXPECT_EQ(whole("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), bad + bad + bad + bad + "A");
  EXPECT_EQ(whole("a\xE2\x82"), "a" + bad);
}

}  // namespace
}  // namespace dynmo::data
