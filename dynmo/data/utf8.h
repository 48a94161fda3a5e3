// SPDX-License-Identifier: Apache-2.0
#pragma once

// UTF-8 as a stream, in pieces of any size (RFC 3629).

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace dynmo::data {

// Where a stream of bytes stands inside a character.
struct Utf8State {
  int expected = 0;            // continuation bytes still to come
  std::uint8_t lowest = 0x80;  // bounds of the next continuation byte
  std::uint8_t highest = 0xBF;

  // False if `byte` cannot follow: the state is then that between two characters.
  [[nodiscard]] bool accept(std::uint8_t byte);
};

// Whether a stream of bytes is text: valid UTF-8 without NUL.
class TextCheck {
 public:
  void feed(std::string_view bytes);
  // Whether all that was fed is text; a character that is not complete yet is none.
  [[nodiscard]] bool is_text() const { return ok_ && state_.expected == 0; }
  // False as soon as no further bytes can mend it.
  [[nodiscard]] bool can_be_text() const { return ok_; }
  // Says why what was fed is no text: "byte 0xe9 at offset 3 is no UTF-8 ..."; "" if it is.
  [[nodiscard]] std::string why_not() const;

 private:
  bool ok_ = true;
  Utf8State state_;
  std::int64_t fed_ = 0;
  std::int64_t begin_ = 0;  // of the last character
  std::uint8_t first_ = 0;  // byte of it
};

// Makes whole characters of a stream that ends anywhere, such as the text of one token after
// another. What is no UTF-8 becomes U+FFFD, one for each longest beginning of a character.
class WholeCharacters {
 public:
  // The characters that are complete now.
  [[nodiscard]] std::string feed(std::string_view bytes);
  // Returns the bytes of an incomplete character at the end.
  [[nodiscard]] std::string finish();

 private:
  std::string begun_;  // bytes of the character being received
  Utf8State state_;
};

// Bytes at the end of `text` that begin a character which they do not complete: 0 to 3.
[[nodiscard]] std::size_t incomplete_tail(std::string_view text);

}  // namespace dynmo::data
