// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of words as an aligned table, for a terminal, and words for numbers.

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

// One line of titles, then one a row, two blanks between columns, `indent` before the first. Every
// row has one word a column; widths count code points of UTF-8. Trailing blanks are cut; every line
// ends with a newline.
[[nodiscard]] std::string table(std::span<const Column> columns,
                                std::span<const std::vector<std::string>> rows, int indent = 2);

// "1 rank", "2 ranks": nouns that only take an s.
[[nodiscard]] std::string format_count(std::int64_t count, std::string_view noun);

}  // namespace dynmo::observe
