// SPDX-License-Identifier: Apache-2.0
#pragma once

// The known word a user most likely meant, for messages about unknown keys and names.

#include <span>
#include <string>
#include <string_view>

namespace dynmo {

// The entry of `known` with the smallest edit distance to `given`; ties go to the first. "" when
// `known` is empty or each differs in a third of its letters or more. Leading dashes do not count.
[[nodiscard]] std::string nearest(std::string_view given, std::span<const std::string> known);

// ", did you mean 'x'?", or nothing: for a message that lists all known words.
[[nodiscard]] std::string did_you_mean(std::string_view given, std::span<const std::string> known);
// ", did you mean 'x'?" or ", known are a, b, c".
[[nodiscard]] std::string suggestion(std::string_view given, std::span<const std::string> known);

}  // namespace dynmo
