// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <utility>

#include "dynmo/observe/progress.h"

namespace dynmo::app {

int columns_now(int descriptor) {
  winsize size{};
  if (::isatty(descriptor) != 1 || ::ioctl(descriptor, TIOCGWINSZ, &size) != 0) return 0;
  return size.ws_col;
}

int terminal_width() {
  const int columns = columns_now(STDOUT_FILENO);
  return columns == 0 ? 100 : std::clamp(columns, 60, 240);
}

std::string time_of_day() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::localtime_r(&now, &parts);
  return fmt::format("{:02}:{:02}:{:02}", parts.tm_hour, parts.tm_min, parts.tm_sec);
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

std::string for_terminal(std::string_view text) {
  std::string shown(text);
  if (terminal_has_utf8()) return shown;
  constexpr std::array<std::pair<std::string_view, char>, 11> kPlain = {{{"▁", '.'},
                                                                         {"▂", '.'},
                                                                         {"▃", ':'},
                                                                         {"▄", ':'},
                                                                         {"▅", '+'},
                                                                         {"▆", '+'},
                                                                         {"▇", '#'},
                                                                         {"█", '#'},
                                                                         {"│", '|'},
                                                                         {"─", '-'},
                                                                         {"·", '.'}}};
  for (const auto& [from, to] : kPlain) {
    for (std::size_t at = shown.find(from); at != std::string::npos; at = shown.find(from, at)) {
      shown.replace(at, from.size(), 1, to);
    }
  }
  return shown;
}

void print_error_text(std::string_view text) {
  // A row of progress on standard output may be open.
  const bool row = ::isatty(STDOUT_FILENO) == 1 && ::isatty(STDERR_FILENO) == 1;
  if (row && !text.starts_with('\r')) std::fputs("\r\033[K", stderr);
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
  const int columns = columns_now(STDERR_FILENO);
  const int width = columns > 0 ? std::max(columns - 1, 1) : 0;
  print_error_text(fmt::format("\r\033[K{}", observe::cut_to_columns(text, width)));
}

void StatusLine::clear() {
  if (used_) print_error_text("\r\033[K");
  used_ = false;
}

}  // namespace dynmo::app
