// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace dynmo::app {

int terminal_width() {
  winsize size{};
  if (::isatty(STDOUT_FILENO) != 1 || ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return 100;
  return size.ws_col == 0 ? 100 : std::clamp<int>(size.ws_col, 60, 240);
}

bool terminal_has_utf8() {
  for (const char* variable : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(variable);
    if (value == nullptr || *value == '\0') continue;
    std::string text = value;
    std::transform(text.begin(), text.end(), text.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return text.find("utf-8") != std::string::npos || text.find("utf8") != std::string::npos;
  }
  return false;
}

void print_error_text(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

int print_error(const Error& error) {
  std::string message = error.message;
  std::replace(message.begin(), message.end(), '\n', ' ');
  print_error_text(fmt::format("dynmo: error: {}\n", message));
  return exit_code(error.code);
}

StatusLine::StatusLine() : on_terminal_(::isatty(STDERR_FILENO) == 1) {}

StatusLine::~StatusLine() { clear(); }

bool StatusLine::is_due() const {
  return on_terminal_ &&
         (!used_ || std::chrono::steady_clock::now() - shown_at_ >= std::chrono::milliseconds(100));
}

void StatusLine::show(std::string_view text) {
  if (!on_terminal_) return;
  used_ = true;
  shown_at_ = std::chrono::steady_clock::now();
  print_error_text(fmt::format("\r\033[K{}", text));
}

void StatusLine::clear() {
  if (used_) print_error_text("\r\033[K");
  used_ = false;
}

}  // namespace dynmo::app
