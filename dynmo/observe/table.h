// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of words as an aligned table, for a terminal.

#include <span>
#include <string>
#include <vector>

namespace dynmo::observe {

struct Column {
  enum class Align { kLeft, kRight };
  std::string title;
  Align align = Align::kRight;
};

// One line of titles, then one a row, two blanks between columns, `indent` before the first. Every
// row has one word a column; widths count code points of UTF-8. Trailing blanks are cut; every line
// ends with a newline.
[[nodiscard]] std::string table(std::span<const Column> columns,
                                std::span<const std::vector<std::string>> rows, int indent = 2);

}  // namespace dynmo::observe
