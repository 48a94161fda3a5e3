// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/table.h"

#include <algorithm>
#include <string_view>

#include "dynmo/core/check.h"

namespace dynmo::observe {
namespace {

std::size_t width_of(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

}  // namespace

std::string table(std::span<const Column> columns, std::span<const std::vector<std::string>> rows,
                  int indent) {
  std::vector<std::vector<std::string>> lines(1);
  for (const Column& column : columns) lines[0].push_back(column.title);
  lines.insert(lines.end(), rows.begin(), rows.end());
  std::vector<std::size_t> widths(columns.size(), 0);
  for (const auto& line : lines) {
    DYNMO_CHECK(line.size() == columns.size(), "a row of {} words, got {}", columns.size(),
                line.size());
    for (std::size_t c = 0; c < line.size(); ++c)
      widths[c] = std::max(widths[c], width_of(line[c]));
  }
  std::string text;
  for (const auto& line : lines) {
    std::string out(static_cast<std::size_t>(std::max(indent, 0)), ' ');
    for (std::size_t c = 0; c < line.size(); ++c) {
      const std::string blanks(widths[c] - width_of(line[c]), ' ');
      if (c > 0) out += "  ";
      out += columns[c].align == Column::Align::kLeft ? line[c] + blanks : blanks + line[c];
    }
    out.erase(out.find_last_not_of(' ') + 1);
    text += out + '\n';
  }
  return text;
}

std::string format_count(std::int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

}  // namespace dynmo::observe
