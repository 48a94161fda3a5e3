// SPDX-License-Identifier: Apache-2.0
#pragma once

// How many of its random cases a test draws. The plain builds draw all; under a sanitizer, where a
// case costs ten times as much and is there for what it touches, the most expensive tests draw a
// fifth. DYNMO_SAMPLES=all draws all everywhere (`make soak`), DYNMO_SAMPLES=part nowhere.

#include <concepts>
#include <cstdlib>
#include <string_view>

namespace dynmo {

inline bool draws_all_samples() {
  if (const char* wanted = std::getenv("DYNMO_SAMPLES")) return std::string_view(wanted) != "part";
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return false;
#else
  return true;
#endif
}

// A number of cases, or how often a verdict is required among them.
template <std::integral T>
T samples(T all) {
  return draws_all_samples() ? all : all / 5;
}

}  // namespace dynmo
