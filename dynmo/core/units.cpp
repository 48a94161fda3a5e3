// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/units.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

namespace dynmo {

Nanoseconds to_nanoseconds(double seconds) { return Nanoseconds{std::llround(seconds * 1e9)}; }

std::string format_bytes(Bytes bytes) {
  constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double amount = static_cast<double>(bytes.value);
  if (std::abs(amount) < 1024) return fmt::format("{} B", bytes.value);
  std::size_t unit = 0;
  for (amount /= 1024; std::abs(amount) >= 1024 && unit + 1 < kUnits.size(); ++unit) amount /= 1024;
  return fmt::format("{:.1f} {}", amount, kUnits[unit]);
}

std::string format_seconds(double seconds) {
  const double magnitude = std::abs(seconds);
  if (magnitude >= 1) return fmt::format("{:.2f} s", seconds);
  if (magnitude >= 1e-3) return fmt::format("{:.2f} ms", seconds * 1e3);
  if (magnitude >= 1e-6) return fmt::format("{:.2f} us", seconds * 1e6);
  return fmt::format("{:.0f} ns", seconds * 1e9);
}

}  // namespace dynmo
