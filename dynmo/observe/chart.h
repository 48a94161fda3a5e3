// SPDX-License-Identifier: Apache-2.0
#pragma once

// Series over time as text, for a terminal: rows of block characters, one plot below another.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace dynmo::observe {

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
