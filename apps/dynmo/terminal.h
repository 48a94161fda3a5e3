// SPDX-License-Identifier: Apache-2.0
#pragma once

// Finds out what standard output can show, and writes to standard error.

#include <fmt/format.h>

#include <chrono>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"

namespace dynmo::app {

// Columns of the terminal, from 60 to 240; 100 where output goes elsewhere.
[[nodiscard]] int terminal_width();

// Columns of the terminal behind a descriptor as it is now; 0 where there is none.
[[nodiscard]] int columns_now(int descriptor);

// "22:31:05", local time.
[[nodiscard]] std::string time_of_day();

// Whether the environment (LC_ALL, LC_CTYPE, LANG: the first that is set) says UTF-8.
[[nodiscard]] bool terminal_has_utf8();

// The text with plain ASCII for the blocks and lines of charts, where the environment does not say
// UTF-8.
[[nodiscard]] std::string for_terminal(std::string_view text);

// Writes to standard error. Nobody may read there, or the disk behind it may be full: that changes
// nothing of what a command does.
void print_error_text(std::string_view text);

// The line that a failed command ends with; returns its exit code.
int print_error(const Error& error);

// "dynmo: " and a line.
template <typename... Args>
void print_note(fmt::format_string<Args...> format, Args&&... args) {
  print_error_text("dynmo: " + fmt::format(format, std::forward<Args>(args)...) + "\n");
}

// A line on standard error that is written over, where that is a terminal; cleared at the end.
class StatusLine {
 public:
  StatusLine();
  ~StatusLine();
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  [[nodiscard]] bool on_terminal() const { return on_terminal_; }
  // Whether the last text is so old (0.1 s) that another may be shown.
  [[nodiscard]] bool is_due() const;
  void show(std::string_view text);
  void clear();

 private:
  bool on_terminal_;
  bool used_ = false;
  std::chrono::steady_clock::time_point shown_at_;
};

}  // namespace dynmo::app
