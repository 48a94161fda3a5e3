// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/nearest.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace dynmo {
namespace {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t substituted = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({substituted, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest(std::string_view given, std::span<const std::string> known) {
  std::size_t best = std::max<std::size_t>(2, given.size() / 2) + 1;
  std::string found;
  for (const std::string& word : known) {
    const std::size_t distance = edit_distance(given, word);
    if (distance < best) {
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
