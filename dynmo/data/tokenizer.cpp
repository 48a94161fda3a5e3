// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/tokenizer.h"

namespace dynmo::data {

void encode_bytes(std::string_view text, std::vector<std::uint16_t>& tokens) {
  tokens.reserve(tokens.size() + text.size());
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
}

std::string decode_bytes(std::span<const std::int32_t> tokens) {
  std::string text;
  for (const std::int32_t token : tokens) {
    if (token >= 0 && token < kEndOfDocument) {
      text += static_cast<char>(token);
    } else {
      text += "\n\n";
    }
  }
  return text;
}

void TextCheck::feed(std::string_view bytes) {
  for (const char c : bytes) {
    if (!ok_) return;
    const auto byte = static_cast<std::uint8_t>(c);
    if (expected_ > 0) {
      ok_ = byte >= lowest_ && byte <= highest_;
      --expected_;
      lowest_ = 0x80;
      highest_ = 0xBF;
    } else if (byte < 0x80) {
      ok_ = byte != 0;
    } else {
      // The second byte is bounded so that over-long forms, surrogates and what lies above U+10FFFF
      // are out (RFC 3629, section 4).
      ok_ = byte >= 0xC2 && byte <= 0xF4;
      expected_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
      if (byte == 0xE0) lowest_ = 0xA0;
      if (byte == 0xED) highest_ = 0x9F;
      if (byte == 0xF0) lowest_ = 0x90;
      if (byte == 0xF4) highest_ = 0x8F;
    }
  }
}

}  // namespace dynmo::data
