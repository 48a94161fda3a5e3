// SPDX-License-Identifier: Apache-2.0
#pragma once

// Detects the width and the characters of standard output, and writes to standard error.

#include <fmt/format.h>

#include <chrono>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"

namespace dynmo::app {

// Returns the columns of the terminal, from 60 to 240, or 100 if output is not a terminal.
[[nodiscard]] int terminal_width();

// Returns the current columns of the terminal at a descriptor, or 0 if that is no terminal.
[[nodiscard]] int columns_now(int descriptor);

// Returns "22:31:05", the local time.
[[nodiscard]] std::string time_of_day();

// Returns whether the environment (LC_ALL, LC_CTYPE, LANG: the first that is set) says UTF-8.
[[nodiscard]] bool terminal_has_utf8();

// Returns the text, with plain ASCII for the blocks and lines of charts if the environment does not
// say UTF-8.
[[nodiscard]] std::string for_terminal(std::string_view text);

// Writes to standard error. A closed reader or a full disk does not affect the command.
void print_error_text(std::string_view text);

// Prints the last line of a failed command, and returns its exit code.
int print_error(const Error& error);

// Prints "dynmo: " and a line.
template <typename... Args>
void print_note(fmt::format_string<Args...> format, Args&&... args) {
  print_error_text("dynmo: " + fmt::format(format, std::forward<Args>(args)...) + "\n");
}

// A line of standard error that each text overwrites. It is shown only on a terminal, and cleared
// by the destructor.
class StatusLine {
 public:
  StatusLine();
  ~StatusLine();
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  [[nodiscard]] bool on_terminal() const { return on_terminal_; }
  // Returns whether the last text is old enough (0.1 s) to be replaced.
  [[nodiscard]] bool is_due() const;
  void show(std::string_view text);
  void clear();

 private:
  bool on_terminal_;
  bool used_ = false;
  std::chrono::steady_clock::time_point shown_at_;
};

}  // namespace dynmo::app
