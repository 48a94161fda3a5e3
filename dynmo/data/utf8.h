// SPDX-License-Identifier: Apache-2.0
#pragma once

// UTF-8 as a stream, in pieces of any size (RFC 3629).

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace dynmo::data {

// The position of a stream of bytes inside a character.
struct Utf8State {
  int expected = 0;            // continuation bytes still to come
  std::uint8_t lowest = 0x80;  // bounds of the next continuation byte
  std::uint8_t highest = 0xBF;

  // Adds a byte. If `byte` cannot follow, resets the state to that between two characters and
  // returns false.
  [[nodiscard]] bool accept(std::uint8_t byte);
};

// Checks whether a stream of bytes is text: valid UTF-8 without NUL.
class TextCheck {
 public:
  void feed(std::string_view bytes);
  // Returns whether the bytes so far are text. An incomplete character is not.
  [[nodiscard]] bool is_text() const { return ok_ && state_.expected == 0; }
  // Returns false as soon as the bytes so far cannot be the beginning of a text.
  [[nodiscard]] bool can_be_text() const { return ok_; }
  // Returns why the bytes are not text, "byte 0xe9 at offset 3 is no UTF-8 ...", or "" if they are.
  [[nodiscard]] std::string why_not() const;

 private:
  bool ok_ = true;
  Utf8State state_;
  std::int64_t fed_ = 0;
  std::int64_t begin_ = 0;  // of the last character
  std::uint8_t first_ = 0;  // byte of it
};

// Returns whole characters of a stream that may end anywhere, such as the texts of successive
// tokens. Each longest invalid beginning of a character becomes U+FFFD.
class WholeCharacters {
 public:
  // Adds bytes and returns the characters that are complete now.
  [[nodiscard]] std::string feed(std::string_view bytes);
  // Ends the stream. Returns U+FFFD if it ends inside a character, else "".
  [[nodiscard]] std::string finish();

 private:
  std::string begun_;  // bytes of the character being received
  Utf8State state_;
};

// Returns the number of bytes at the end of `text` that begin an incomplete character: 0 to 3.
[[nodiscard]] std::size_t incomplete_tail(std::string_view text);

}  // namespace dynmo::data
