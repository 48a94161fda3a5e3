// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/allowed.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "dynmo/core/nearest.h"

namespace dynmo {
namespace {

// Returns whole numbers without an exponent, because most limits are counts.
std::string number(double value) {
  const bool whole = std::floor(value) == value && std::abs(value) < 1e15;
  return whole ? fmt::format("{}", static_cast<std::int64_t>(value)) : fmt::format("{}", value);
}

bool holds(const Range& range, double value) {
  const bool enough = range.above_min ? value > range.min : value >= range.min;
  const bool not_too_much = range.below_max ? value < range.max : value <= range.max;
  return enough && not_too_much;
}

Expected<void> check_number(std::string_view key, double value, std::string_view shown,
                            const Allowed& allowed) {
  const auto* range = std::get_if<Range>(&allowed);
  if (range == nullptr || holds(*range, value)) return {};
  return make_error(ErrorCode::kBadInput, "{} is {}, wanted {}", key, shown, text_of(*range));
}

Expected<void> check_text(std::string_view key, std::string_view value, const Allowed& allowed) {
  if (const auto* names = std::get_if<Names>(&allowed)) {
    if (std::find(names->begin(), names->end(), value) != names->end()) return {};
    return make_error(ErrorCode::kBadInput, "{} is '{}', wanted {}{}", key, value, listed(*names),
                      did_you_mean(value, std::vector<std::string>(names->begin(), names->end())));
  }
  if (const auto* readable = std::get_if<Readable>(&allowed)) {
    const auto read = (*readable)(std::string(value));
    if (!read) return make_error(ErrorCode::kBadInput, "{}: {}", key, read.error().message);
  }
  return {};
}

}  // namespace

Range at_least(double min, std::string note) { return {.min = min, .note = std::move(note)}; }
Range above(double min, std::string note) {
  return {.min = min, .above_min = true, .note = std::move(note)};
}
Range between(double min, double max, std::string note) {
  return {.min = min, .max = max, .note = std::move(note)};
}
Range above_to(double min, double max, std::string note) {
  return {.min = min, .max = max, .above_min = true, .note = std::move(note)};
}
Range from_below(double min, double max, std::string note) {
  return {.min = min, .max = max, .below_max = true, .note = std::move(note)};
}

std::string text_of(const Range& range) {
  const bool limited = range.max != std::numeric_limits<double>::infinity();
  std::string text;
  if (range.above_min) {
    text = fmt::format("above {}", number(range.min));
    if (limited) text += fmt::format(" and at most {}", number(range.max));
  } else if (!limited) {
    text = fmt::format("{} or more", number(range.min));
  } else {
    text = fmt::format("{} to {}{}", number(range.min), range.below_max ? "below " : "",
                       number(range.max));
  }
  return range.note.empty() ? text : text + " " + range.note;
}

std::string listed(std::span<const std::string_view> names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " or " : ", ";
    text += names[i];
  }
  return text;
}

Expected<void> check_allowed(std::string_view key, const AllowedValue& value,
                             const Allowed& allowed) {
  if (const auto* text = std::get_if<std::string_view>(&value)) {
    return check_text(key, *text, allowed);
  }
  if (const auto* whole = std::get_if<std::int64_t>(&value)) {
    return check_number(key, static_cast<double>(*whole), fmt::format("{}", *whole), allowed);
  }
  const double number = std::get<double>(value);
  return check_number(key, number, fmt::format("{}", number), allowed);
}

}  // namespace dynmo
