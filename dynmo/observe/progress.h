// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shows the progress of a run. On a terminal it is one line that is overwritten, and never wider
// than the terminal. Elsewhere it is a line at intervals, with the time and the time left. The
// caller supplies clock and width, and writes the text.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace dynmo::observe {

// Returns at most `columns` columns of the text, whole UTF-8 characters of one column each; 0: all
// of it.
[[nodiscard]] std::string_view cut_to_columns(std::string_view text, int columns);

// Returns "40 s", "12 min", or "3 h 5 min".
[[nodiscard]] std::string time_left(std::chrono::duration<double> left);

class Progress {
 public:
  using Clock = std::chrono::steady_clock;
  // The state of clock and terminal at an update.
  struct Now {
    Clock::time_point clock;
    std::string time_of_day;  // for the user, "22:31:05"
    int columns = 0;          // of the terminal; 0: not known
  };
  enum class On { kTerminal, kFile };
  explicit Progress(On on) : on_(on) {}

  // Returns the text to write for a line that stays.
  [[nodiscard]] std::string line(std::string_view text) const;
  // Returns the text to write after a step, or "" if no line is due. A file has a line after each
  // twentieth of all steps, and after a minute at the latest. `text` is called for a line only.
  [[nodiscard]] std::string step(std::int64_t done, std::int64_t steps,
                                 const std::function<std::string()>& text, const Now& now);

 private:
  struct Mark {
    std::int64_t done = 0;
    Clock::time_point at;
  };
  On on_;
  std::optional<Mark> first_;   // at the first call of step()
  Clock::time_point shown_at_;  // time of the newest line in a file
};

}  // namespace dynmo::observe
