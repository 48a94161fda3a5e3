// SPDX-License-Identifier: Apache-2.0
#pragma once

// Series over time as text, for a terminal: rows of block characters, one plot a series below
// another.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace dynmo::observe {

struct Series {
  std::string name;
  std::vector<double> values;  // one a step; values that are not finite leave a gap
};

struct ChartOptions {
  int width = 64;          // columns of the plot at most; more values than that are averaged
  int height = 4;          // rows a series
  std::int64_t first = 0;  // what the first value is numbered
  std::string unit = "step";
};

// All series share one scale, from 0 (or the least value, if that is below) to the largest, so that
// they can be compared. Requires width >= 1, height >= 1. UTF-8; every line ends with a newline.
[[nodiscard]] std::string chart(std::span<const Series> series, const ChartOptions& options = {});

}  // namespace dynmo::observe
