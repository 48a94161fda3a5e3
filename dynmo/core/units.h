// SPDX-License-Identifier: Apache-2.0
#pragma once

// Bytes as a type of its own, and how amounts are printed. Times are double seconds in costs and
// std::chrono::nanoseconds in the simulator and in timelines.

#include <chrono>
#include <compare>
#include <cstdint>
#include <string>

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

// "512 B", "1.5 KiB", "64.0 MiB".
[[nodiscard]] std::string format_bytes(Bytes bytes);
// "85 ns", "1.25 ms", "3.2 s".
[[nodiscard]] std::string format_seconds(double seconds);

}  // namespace dynmo
