// SPDX-License-Identifier: Apache-2.0
#pragma once

// Finds the `added_tokens` of a tokenizer.json in a text, before any other step cuts it.

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace dynmo::data {

struct AddedToken {
  std::string content;
  std::int32_t id = 0;
  bool left_strip = false;   // takes the white space before it
  bool right_strip = false;  // and behind it
};

// Finds the added tokens in text. Immutable: any number of threads may use one.
class AddedTokens {
 public:
  // Holds the tokens. Those without content are never found.
  explicit AddedTokens(std::vector<AddedToken> tokens);
  AddedTokens(AddedTokens&&) = default;
  AddedTokens& operator=(AddedTokens&&) = default;

  // Calls `take_token` for each token and `take_text` for the text between them, in order. If
  // several tokens begin at one place, the longest is taken.
  void split(std::string_view text, const std::function<void(std::string_view)>& take_text,
             const std::function<void(std::int32_t)>& take_token) const;

 private:
  [[nodiscard]] const AddedToken* at(std::string_view text, std::size_t place) const;

  std::vector<AddedToken> tokens_;
  std::unordered_map<std::string_view, std::size_t> by_content_;  // views into tokens_
  std::array<std::vector<std::size_t>, 256> sizes_;  // by first byte, the longest first
};

}  // namespace dynmo::data
