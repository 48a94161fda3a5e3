// SPDX-License-Identifier: Apache-2.0
#pragma once

// The values that a key of a config may have, as data beside the key. Checks and messages both
// follow it.

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo {

// A range of numbers. Both limits are included unless `above_min` or `below_max` excludes one.
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;
  bool below_max = false;
  // Text behind the limits in a message: a unit, or the meaning of 0.
  std::string note = {};
};
[[nodiscard]] Range at_least(double min, std::string note = {});
[[nodiscard]] Range above(double min, std::string note = {});
[[nodiscard]] Range between(double min, double max, std::string note = {});
[[nodiscard]] Range above_to(double min, double max, std::string note = {});
[[nodiscard]] Range from_below(double min, double max, std::string note = {});

// The value is one of these texts.
using Names = std::vector<std::string_view>;
// The value is a text that this function can parse. Its error says what is wanted.
using Readable = std::function<Expected<void>(const std::string&)>;
template <typename Parse>
[[nodiscard]] Readable readable_by(Parse parse) {
  return [parse](const std::string& text) -> Expected<void> {
    DYNMO_TRY(parse(text));
    return {};
  };
}

using Allowed = std::variant<std::monostate, Range, Names, Readable>;
using AllowedValue = std::variant<std::int64_t, double, std::string_view>;

// Returns "0 to 1", "1 to 4096 (...)", "above 0 and at most 1", or "0 or more".
[[nodiscard]] std::string text_of(const Range& range);
// Returns "cpu, cuda or emulated".
[[nodiscard]] std::string listed(std::span<const std::string_view> names);

// Checks that `allowed` admits the value. If not, returns kBadInput: "train.steps is 0, wanted 1 to
// 16777216". NaN is in no range.
[[nodiscard]] Expected<void> check_allowed(std::string_view key, const AllowedValue& value,
                                           const Allowed& allowed);

}  // namespace dynmo
