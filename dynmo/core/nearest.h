// SPDX-License-Identifier: Apache-2.0
#pragma once

// Finds the known word that a user most likely meant, for messages about unknown keys and names.

#include <span>
#include <string>
#include <string_view>

namespace dynmo {

// Returns the entry of `known` with the smallest edit distance to `given`, and the first one on a
// tie. Returns "" if `known` is empty or each entry differs in a third of its letters or more.
// Leading dashes do not count.
[[nodiscard]] std::string nearest(std::string_view given, std::span<const std::string> known);

// Returns ", did you mean 'x'?" with nearest(), or "" if there is none, for a message that lists
// all known words.
[[nodiscard]] std::string did_you_mean(std::string_view given, std::span<const std::string> known);
// Returns did_you_mean(), or ", known are a, b, c" if that is empty.
[[nodiscard]] std::string suggestion(std::string_view given, std::span<const std::string> known);

}  // namespace dynmo
