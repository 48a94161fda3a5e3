// SPDX-License-Identifier: Apache-2.0
#pragma once

// When and how the progress of a run is shown: on a terminal one line that is written over, never
// wider than the terminal; elsewhere a line now and then, with the time and the time left. Values
// in, text out: the clock and the width are the caller's.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace dynmo::observe {

// At most so many columns of the text, whole UTF-8 characters of one column each; 0: all of it.
[[nodiscard]] std::string_view cut_to_columns(std::string_view text, int columns);

// "40 s", "12 min", "3 h 5 min".
[[nodiscard]] std::string time_left(std::chrono::duration<double> left);

class Progress {
 public:
  using Clock = std::chrono::steady_clock;
  // The state of clock and terminal when something is shown.
  struct Now {
    Clock::time_point clock;
    std::string time_of_day;  // for people, "22:31:05"
    int columns = 0;          // of the terminal; 0: not known
  };
  enum class On { kTerminal, kFile };
  explicit Progress(On on) : on_(on) {}

  // Returns the text to write for a line that stays.
  [[nodiscard]] std::string line(std::string_view text) const;
  // Returns the text to write after a step: "" where nothing is due. A file gets a twentieth of all
  // steps, and a line after a minute at the latest.
  [[nodiscard]] std::string step(std::int64_t done, std::int64_t steps, std::string_view text,
                                 const Now& now);

 private:
  struct Mark {
    std::int64_t done = 0;
    Clock::time_point at;
  };
  On on_;
  std::optional<Mark> first_;   // the first step that was done
  Clock::time_point shown_at_;  // the newest line in a file
};

}  // namespace dynmo::observe
