// SPDX-License-Identifier: Apache-2.0
#pragma once

// How many of its random cases a test draws. The plain builds draw all; under a sanitizer, where a
// case costs ten times as much and is there for what it touches, the most expensive tests draw a
// fifth. DYNMO_SAMPLES=all draws all everywhere (`make soak`), DYNMO_SAMPLES=part nowhere. With
// DYNMO_DRAW, which CI sets to its commit, the most expensive tests draw fewer, by the commit.

#include <concepts>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
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

// Returns the seed that CI gives, the start of its commit.
inline std::optional<std::uint64_t> drawing_seed() {
  const char* commit = std::getenv("DYNMO_DRAW");
  if (commit == nullptr || *commit == '\0') return std::nullopt;
  return std::strtoull(std::string(commit).substr(0, 12).c_str(), nullptr, 16);
}

// Returns the seed, and prints what is drawn by it. .ci/run shows the lines with `drawn by`.
inline std::optional<std::uint64_t> drawn_by(const char* what) {
  const auto seed = drawing_seed();
  if (seed) std::printf("[          ] drawn by %.12s: %s\n", std::getenv("DYNMO_DRAW"), what);
  return seed;
}

// Returns whether a case is drawn. CI draws every `of`-th one, others draw all.
inline bool draws(std::uint64_t item, std::uint64_t of) {
  const auto seed = drawing_seed();
  return !seed || item % of == *seed % of;
}

// A number of cases, or how often a verdict is required among them.
template <std::integral T>
T samples(T all) {
  return draws_all_samples() ? all : all / 5;
}

}  // namespace dynmo
