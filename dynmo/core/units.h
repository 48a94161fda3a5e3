// SPDX-License-Identifier: Apache-2.0
#pragma once

// Bytes as a separate type, and how amounts are printed and parsed. Times are double seconds in
// costs and std::chrono::nanoseconds in the simulator and in timelines.

#include <chrono>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"

namespace dynmo {

struct Bytes {
  std::int64_t value = 0;

  constexpr Bytes() = default;
  constexpr explicit Bytes(std::int64_t bytes) : value(bytes) {}
  friend constexpr auto operator<=>(Bytes, Bytes) = default;
  constexpr Bytes& operator+=(Bytes other) { return value += other.value, *this; }
  constexpr Bytes& operator-=(Bytes other) { return value -= other.value, *this; }
  friend constexpr Bytes operator+(Bytes a, Bytes b) { return Bytes{a.value + b.value}; }
  friend constexpr Bytes operator-(Bytes a, Bytes b) { return Bytes{a.value - b.value}; }
  friend constexpr Bytes operator*(Bytes a, std::int64_t n) { return Bytes{a.value * n}; }
};

using Nanoseconds = std::chrono::nanoseconds;

// Rounds to the nearest nanosecond. Requires finite seconds of at most about 290 years.
[[nodiscard]] Nanoseconds to_nanoseconds(double seconds);
[[nodiscard]] inline double to_seconds(Nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

// Returns "512 B", "1.5 KiB", or "64.0 MiB".
[[nodiscard]] std::string format_bytes(Bytes bytes);
// Returns "85 ns", "1.25 ms", or "3.2 s".
[[nodiscard]] std::string format_seconds(double seconds);

// Parses an amount of flags and configs, such as "80GiB", "512 MB" or "1.5TiB", and rounds to whole
// bytes. It is a non-negative number and a unit, with or without a space between. KB, MB, ... are
// powers of 1000 and KiB, MiB, ... of 1024. No unit means bytes, like B. Returns kBadInput with the
// text and the units.
[[nodiscard]] Expected<Bytes> parse_bytes(std::string_view text);
// Parses "20us", "1.5 ms" or "2h". Units are ns, us, ms, s, min and h. No unit means seconds. Fails
// with kBadInput.
[[nodiscard]] Expected<double> parse_seconds(std::string_view text);
// Parses "450GB/s", bytes a second. No unit means B/s. Fails with kBadInput, also for bits
// ("400Gb/s").
[[nodiscard]] Expected<double> parse_bytes_per_second(std::string_view text);

}  // namespace dynmo
