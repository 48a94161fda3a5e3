// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/utf8.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace dynmo::data {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace

bool Utf8State::accept(std::uint8_t byte) {
  bool good = true;
  if (expected > 0) {
    good = byte >= lowest && byte <= highest;
    expected = good ? expected - 1 : 0;
    lowest = 0x80;
    highest = 0xBF;
  } else if (byte >= 0x80) {
    // Bounds of the second byte exclude over-long forms, surrogates and numbers above U+10FFFF (RFC
    // 3629, section 4).
    good = byte >= 0xC2 && byte <= 0xF4;
    if (!good) return false;
    expected = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
    if (byte == 0xE0) lowest = 0xA0;
    if (byte == 0xED) highest = 0x9F;
    if (byte == 0xF0) lowest = 0x90;
    if (byte == 0xF4) highest = 0x8F;
  }
  return good;
}

void TextCheck::feed(std::string_view bytes) {
  for (std::size_t i = 0; i < bytes.size() && ok_; ++i) {
    const auto byte = static_cast<std::uint8_t>(bytes[i]);
    if (state_.expected == 0) {
      begin_ = fed_;
      first_ = byte;
    }
    ok_ = byte != 0 && state_.accept(byte);
    ++fed_;
  }
}

std::string TextCheck::why_not() const {
  if (is_text()) return "";
  if (first_ == 0) return fmt::format("binary, with a NUL byte at offset {}", begin_);
  return fmt::format(
      "byte 0x{:02x} at offset {} is no UTF-8: convert it (iconv -f LATIN1 -t UTF-8)", first_,
      begin_);
}

std::string WholeCharacters::feed(std::string_view bytes) {
  std::string whole;
  for (const char c : bytes) {
    const bool inside = state_.expected > 0;
    bool good = state_.accept(static_cast<std::uint8_t>(c));
    if (!good && inside) {  // ends the character, and may begin the next
      begun_.clear();
      whole += kReplacement;
      good = state_.accept(static_cast<std::uint8_t>(c));
    }
    if (!good) {
      whole += kReplacement;
      continue;
    }
    begun_ += c;
    if (state_.expected == 0) whole += std::exchange(begun_, {});
  }
  return whole;
}

std::string WholeCharacters::finish() {
  const bool left = !begun_.empty();
  begun_.clear();
  state_ = {};
  return left ? std::string(kReplacement) : std::string();
}

std::size_t incomplete_tail(std::string_view text) {
  // An incomplete character has at most three bytes.
  for (std::size_t size = 1; size <= std::min<std::size_t>(3, text.size()); ++size) {
    const auto byte = static_cast<std::uint8_t>(text[text.size() - size]);
    if (byte < 0x80) return 0;
    if (byte < 0xC0) continue;
    const std::size_t length = byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
    return length > size ? size : 0;
  }
  return 0;
}

}  // namespace dynmo::data
