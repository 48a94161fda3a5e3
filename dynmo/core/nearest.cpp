// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/nearest.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace dynmo {
namespace {

// Returns the edit distance. A missing, added or different letter counts one, and so do two swapped
// neighbours.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1);  // the row before the last
  std::vector<std::size_t> last(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::swap(before, last);
    std::swap(last, row);
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t substituted = last[j] + (a[i] == b[j] ? 0 : 1);
      row[j + 1] = std::min({substituted, row[j] + 1, last[j + 1] + 1});
      const bool swapped = i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j];
      if (swapped) row[j + 1] = std::min(row[j + 1], before[j - 1] + 1);
    }
  }
  return row.back();
}

std::string_view without_dashes(std::string_view word) {
  const std::size_t dashes = word.find_first_not_of('-');
  return dashes == std::string_view::npos ? word : word.substr(dashes);
}

}  // namespace

std::string nearest(std::string_view given, std::span<const std::string> known) {
  given = without_dashes(given);
  std::size_t best = given.size() + 1;
  std::string found;
  for (const std::string& word : known) {
    const std::string_view bare = without_dashes(word);
    const std::size_t distance = edit_distance(given, bare);
    const bool near = 3 * distance < std::max(given.size(), bare.size());
    if (near && distance < best) {
      best = distance;
      found = word;
    }
  }
  return found;
}

std::string did_you_mean(std::string_view given, std::span<const std::string> known) {
  const std::string found = nearest(given, known);
  return found.empty() ? found : fmt::format(", did you mean '{}'?", found);
}

std::string suggestion(std::string_view given, std::span<const std::string> known) {
  const std::string near = did_you_mean(given, known);
  if (!near.empty() || known.empty()) return near;
  return fmt::format(", known are {}", fmt::join(known, ", "));
}

}  // namespace dynmo
