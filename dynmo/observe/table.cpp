// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
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

namespace {

constexpr std::array<std::string_view, 9> kBlocks = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
constexpr int kEighths = 8;

// Returns the mean of the finite values in each column, or NaN if it has none.
std::vector<double> columns_of(const std::vector<double>& values, int width) {
  const std::size_t columns = std::min(values.size(), static_cast<std::size_t>(width));
  std::vector<double> means;
  for (std::size_t c = 0; c < columns; ++c) {
    const std::size_t end = (c + 1) * values.size() / columns;
    double sum = 0;
    int count = 0;
    for (std::size_t i = c * values.size() / columns; i < end; ++i) {
      if (!std::isfinite(values[i])) continue;
      sum += values[i];
      ++count;
    }
    means.push_back(count > 0 ? sum / count : std::numeric_limits<double>::quiet_NaN());
  }
  return means;
}

struct Scale {
  double least = 0;
  double most = 0;

  // Returns how many eighths of rows a value fills. A value above the lowest fills at least one.
  [[nodiscard]] int eighths(double value, int height) const {
    if (!std::isfinite(value) || !(most > least)) return 0;
    const double share = (value / 2 - least / 2) / (most / 2 - least / 2);  // halves: no overflow
    const int filled = static_cast<int>(std::lround(share * height * kEighths));
    return value > least ? std::max(filled, 1) : filled;
  }
};

std::string label(double value) { return fmt::format("{:>9.3g}", value); }

std::string plot(const std::vector<double>& columns, const Scale& scale, int height) {
  std::string text;
  for (int row = height - 1; row >= 0; --row) {
    const bool top = row == height - 1;
    text += top ? label(scale.most) : row == 0 ? label(scale.least) : std::string(9, ' ');
    text += " │";
    std::string line;
    std::size_t kept = 0;  // trailing blanks are cut
    for (const double value : columns) {
      const int filled = std::clamp(scale.eighths(value, height) - row * kEighths, 0, kEighths);
      line += kBlocks[static_cast<std::size_t>(filled)];
      if (filled > 0) kept = line.size();
    }
    text += line.substr(0, kept) + '\n';
  }
  return text;
}

}  // namespace

std::string chart(std::span<const Series> series, const ChartOptions& options) {
  DYNMO_CHECK(options.width >= 1 && options.height >= 1, "a chart of at least 1 x 1, got {} x {}",
              options.width, options.height);
  std::vector<std::vector<double>> plots;
  Scale scale;
  std::size_t longest = 0;
  for (const Series& one : series) {
    plots.push_back(columns_of(one.values, options.width));
    longest = std::max(longest, one.values.size());
    for (const double value : plots.back()) {
      if (!std::isfinite(value)) continue;
      scale.least = std::min(scale.least, value);
      scale.most = std::max(scale.most, value);
    }
  }
  std::string text;
  for (std::size_t i = 0; i < plots.size(); ++i) {
    text += series[i].name + '\n' + plot(plots[i], scale, options.height);
  }
  if (longest > 0) {
    text += fmt::format("{:>11}{} {} to {}\n", "", options.unit, options.first,
                        options.first + static_cast<std::int64_t>(longest) - 1);
  }
  return text;
}

}  // namespace dynmo::observe
