// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of words as an aligned table, and numbers of steps as a chart, for a terminal.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace dynmo::observe {

struct Column {
  enum class Align { kLeft, kRight };
  std::string title;
  Align align = Align::kRight;
};

// Returns one line of titles and one for each row. Columns have two blanks between them and
// `indent` before the first. Each row has one word for each column. Widths count code points of
// UTF-8. Trailing blanks are cut. Every line ends with a newline.
[[nodiscard]] std::string table(std::span<const Column> columns,
                                std::span<const std::vector<std::string>> rows, int indent = 2);

// Returns "1 rank" or "2 ranks", for nouns with a plural in s.
[[nodiscard]] std::string format_count(std::int64_t count, std::string_view noun);

// A name and the numbers that a chart draws under it.
struct Series {
  std::string name;
  std::vector<double> values;  // one for each step; values that are not finite leave a gap
};

struct ChartOptions {
  int width = 64;          // maximum columns of the plot; more values are averaged
  int height = 4;          // rows a series
  std::int64_t first = 0;  // number of the first value
  std::string unit = "step";
};

// Draws the series with one common scale, so that they can be compared. It reaches from 0, or the
// least value if that is lower, to the largest. The text is UTF-8, and every line ends with a
// newline. Requires width >= 1, height >= 1.
[[nodiscard]] std::string chart(std::span<const Series> series, const ChartOptions& options = {});

}  // namespace dynmo::observe
