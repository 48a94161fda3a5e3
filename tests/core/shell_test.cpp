// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/shell.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <string>

namespace dynmo {
namespace {

// The words that a shell makes of a command line, a line each.
std::string words_of(const std::string& command) {
  std::FILE* shell = ::popen(("printf '%s\\n' " + command).c_str(), "r");
  std::string text;
  std::array<char, 256> piece{};
  for (std::size_t got = 1; got > 0;) {
    got = std::fread(piece.data(), 1, piece.size(), shell);
    text.append(piece.data(), got);
  }
  EXPECT_EQ(::pclose(shell), 0) << command;
  return text;
}

TEST(Shell, AQuotedWordIsReadBackAsItWas) {
  for (const std::string word : {"plain",
                                 "runs/a-b_c.0",
                                 "train.init=runs/a",
                                 "my run",
                                 "it's",
                                 "''",
                                 "a\"b",
                                 "$HOME",
                                 "`id`",
                                 "a\\b",
                                 "*",
                                 "~",
                                 "a;b",
                                 "a&b",
                                 "(a)",
                                 "<a>",
                                 "a|b",
                                 "#a",
                                 "a#b",
                                 "!a",
                                 "[a]",
                                 "{a,b}",
                                 "\ta",
                                 "é",
                                 "-n",
                                 "~root",
                                 "a=~",
                                 ""}) {
    EXPECT_EQ(words_of(shell_quote(word)), word + "\n");
  }
}

TEST(Shell, APlainWordStaysAsItIs) {
  for (const std::string word : {"run", "/tmp/run-1/config.toml", "train.init=a:b", "100%"}) {
    EXPECT_EQ(shell_quote(word), word);
  }
}

}  // namespace
}  // namespace dynmo
