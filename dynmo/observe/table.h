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

// Returns one line of titles and one for each row. Columns have two blanks between them and
// `indent` before the first. Each row has one word for each column. Widths count code points of
// UTF-8. Trailing blanks are cut. Every line ends with a newline.
[[nodiscard]] std::string table(std::span<const Column> columns,
                                std::span<const std::vector<std::string>> rows, int indent = 2);

// Returns "1 rank" or "2 ranks", for nouns with a plural in s.
[[nodiscard]] std::string format_count(std::int64_t count, std::string_view noun);

}  // namespace dynmo::observe
