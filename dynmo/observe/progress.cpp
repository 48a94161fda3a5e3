// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace dynmo::observe {
namespace {

constexpr std::chrono::seconds kMaxSilence{60};
constexpr std::int64_t kLines = 20;  // of a whole run in a file, where it is short

constexpr std::string_view kClearLine = "\r\033[K";

}  // namespace

std::string_view cut_to_columns(std::string_view text, int columns) {
  if (columns <= 0) return text;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const bool begins_character = (static_cast<unsigned char>(text[at]) & 0xC0) != 0x80;
    if (begins_character && columns-- == 0) return text.substr(0, at);
  }
  return text;
}

std::string time_left(std::chrono::duration<double> left) {
  const auto seconds = static_cast<std::int64_t>(std::llround(std::max(left.count(), 0.0)));
  if (seconds < 100) return fmt::format("{} s", seconds);
  const std::int64_t minutes = (seconds + 30) / 60;
  if (minutes < 100) return fmt::format("{} min", minutes);
  return fmt::format("{} h {} min", minutes / 60, minutes % 60);
}

std::string Progress::line(std::string_view text) const {
  return fmt::format("{}{}\n", on_ == On::kTerminal ? kClearLine : "", text);
}

std::string Progress::step(std::int64_t done, std::int64_t steps,
                           const std::function<std::string()>& text, const Now& now) {
  if (!first_) {
    first_ = Mark{done, now.clock};
    shown_at_ = now.clock;
  }
  const bool due = on_ == On::kTerminal || done % std::max<std::int64_t>(1, steps / kLines) == 0 ||
                   now.clock - shown_at_ >= kMaxSilence;
  if (!due) return "";
  std::string full = text();
  if (done > first_->done && done < steps) {
    const std::chrono::duration<double> taken = now.clock - first_->at;
    full += fmt::format("  {} left", time_left(taken / static_cast<double>(done - first_->done) *
                                               static_cast<double>(steps - done)));
  }
  if (on_ == On::kTerminal) {
    const int width = now.columns > 0 ? std::max(now.columns - 1, 1) : 0;
    // A terminal wraps a line that fills it, and then only its last row would be cleared.
    return fmt::format("{}{}", kClearLine, cut_to_columns(full, width));
  }
  shown_at_ = now.clock;
  return fmt::format("{}  {}\n", full, now.time_of_day);
}

}  // namespace dynmo::observe
