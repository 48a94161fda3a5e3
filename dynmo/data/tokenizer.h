// SPDX-License-Identifier: Apache-2.0
#pragma once

// The byte tokenizer: a token is a byte of the UTF-8 text, plus one that ends a document. It needs
// no training and no file, loses nothing, and keeps the vocabulary so small that examples spend
// their time in the layers.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace dynmo::data {

inline constexpr std::string_view kByteTokenizer = "bytes";
inline constexpr std::int32_t kByteVocabulary = 257;
inline constexpr std::int32_t kEndOfDocument = 256;

// Appends the tokens of `text`; any bytes are text.
void encode_bytes(std::string_view text, std::vector<std::uint16_t>& tokens);

// The text of tokens 0..255; the end of a document and ids outside the vocabulary become "\n\n".
[[nodiscard]] std::string decode_bytes(std::span<const std::int32_t> tokens);

// Whether a stream of bytes is text: valid UTF-8 (RFC 3629) without NUL. Fed in pieces of any size.
class TextCheck {
 public:
  void feed(std::string_view bytes);
  // Whether all that was fed is text; a character that is not complete yet is none.
  [[nodiscard]] bool is_text() const { return ok_ && expected_ == 0; }
  // False as soon as no further bytes can mend it.
  [[nodiscard]] bool can_be_text() const { return ok_; }

 private:
  bool ok_ = true;
  int expected_ = 0;            // continuation bytes still to come
  std::uint8_t lowest_ = 0x80;  // bounds of the next continuation byte
  std::uint8_t highest_ = 0xBF;
};

}  // namespace dynmo::data
