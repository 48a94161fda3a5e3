// SPDX-License-Identifier: Apache-2.0
#pragma once

// The pattern by which a tokenizer.json cuts text into pieces. The source of this header is the
// only file that knows PCRE2. The files are written for Oniguruma, whose syntax and classes differ,
// so a pattern is translated, and refused where both could disagree.

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"

namespace dynmo::data {

// The pattern of GPT-2's pre-tokenizer (ByteLevel with use_regex).
inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Translates the pattern to PCRE2's syntax. Returns kBadInput with the first construct that PCRE2
// interprets differently, or that could take exponential time.
[[nodiscard]] Expected<std::string> translate_pattern(std::string_view pattern);

// A pattern that splits text into pieces. A value: copies share the compiled pattern. Any number of
// threads may use one, each with a State of its own, which serves all patterns.
class SplitPattern {
 public:
  class State {
   public:
    State();
    ~State();
    State(State&& other) noexcept;
    State& operator=(State&& other) noexcept;

   private:
    friend class SplitPattern;
    struct Memory;
    std::unique_ptr<Memory> memory_;
  };

  // Compiles a pattern. Returns the errors of translate_pattern(), and kBadInput for a pattern that
  // PCRE2 refuses or that matches the empty text.
  [[nodiscard]] static Expected<SplitPattern> compile(std::string_view pattern);

  // Calls `take` for each match and for the text between matches, in order. `text` is valid UTF-8.
  void split(std::string_view text, State& state,
             const std::function<void(std::string_view)>& take) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace dynmo::data
