// SPDX-License-Identifier: Apache-2.0
#pragma once

// The checked content of a tokenizer.json, from which tokenizer_json.h makes a tokenizer.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/data/added_tokens_impl.h"
#include "dynmo/data/byte_pairs_impl.h"
#include "dynmo/data/split_pattern_impl.h"
#include "dynmo/data/tokenizer_json.h"

namespace dynmo::data {

inline constexpr std::int32_t kMaxTokenIds = 1 << 20;

// The characters by which a tokenizer.json writes the bytes of a token.
class ByteTable {
 public:
  ByteTable();
  // Returns the bytes that `written` stands for, or nullopt if it has another character.
  [[nodiscard]] std::optional<std::string> bytes_of(std::string_view written) const;
  [[nodiscard]] const std::string& character_of(std::uint8_t byte) const {
    return characters_[byte];
  }

 private:
  std::array<std::string, 256> characters_;
  std::unordered_map<std::string, char> bytes_;
};

struct TokenizerParts {
  std::unordered_map<std::string, std::int32_t> ids;  // by the token as the file writes it
  std::vector<std::string> texts;                     // bytes of each token, by id
  std::array<std::int32_t, 256> bytes{};              // token of each byte
  std::vector<TokenMerge> merges;
  bool ignore_merges = false;
  bool normalizes = false;             // to the normal form C
  std::vector<SplitPattern> patterns;  // applied one behind the other
  std::vector<AddedToken> raw;         // found before the text is normalized
  std::vector<AddedToken> normalized;  // found behind that
  std::vector<std::int32_t> special;
};

// Returns Unicode's normal form C of `text`, which is valid UTF-8. `room` holds it if it differs.
[[nodiscard]] std::string_view normal_form_c(std::string_view text, std::string& room);

// Returns the beginning of a text in quotes, on one line.
[[nodiscard]] std::string in_quotes(std::string_view text);

[[nodiscard]] Expected<TokenizerParts> read_tokenizer_parts(std::string_view content,
                                                            const std::string& origin);

}  // namespace dynmo::data
