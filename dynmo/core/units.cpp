// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/units.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <span>

namespace dynmo {
namespace {

struct Unit {
  std::string_view name;
  double factor = 1;
};

constexpr double kKi = 1024;
constexpr std::array<Unit, 13> kByteUnits = {{{"B", 1},
                                              {"KB", 1e3},
                                              {"kB", 1e3},
                                              {"MB", 1e6},
                                              {"GB", 1e9},
                                              {"TB", 1e12},
                                              {"PB", 1e15},
                                              {"KiB", kKi},
                                              {"MiB", kKi* kKi},
                                              {"GiB", kKi* kKi* kKi},
                                              {"TiB", kKi* kKi* kKi* kKi},
                                              {"PiB", kKi* kKi* kKi* kKi* kKi},
                                              {"", 1}}};
constexpr std::array<Unit, 7> kTimeUnits = {
    {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}, {"min", 60}, {"h", 3600}, {"", 1}}};

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// Returns a number, 0 or more, times its unit. Returns nullopt for any other text.
std::optional<double> parse_amount(std::string_view text, std::span<const Unit> units) {
  text = trimmed(text);
  double number = 0;
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (fault != std::errc{} || !std::isfinite(number) || number < 0) return std::nullopt;
  const std::string_view unit = trimmed(text.substr(static_cast<std::size_t>(end - text.data())));
  for (const Unit& known : units) {
    const double amount = number * known.factor;
    if (unit == known.name && std::isfinite(amount)) return amount;
  }
  return std::nullopt;
}

}  // namespace

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

Expected<Bytes> parse_bytes(std::string_view text) {
  constexpr double kMaxBytes = 0x1p62;
  const std::optional<double> amount = parse_amount(text, kByteUnits);
  if (amount && *amount <= kMaxBytes) return Bytes{std::llround(*amount)};
  return make_error(ErrorCode::kBadInput,
                    "'{}' is not an amount of bytes, wanted a number, 0 or more, and B, KB, MB, "
                    "GB, TB, PB (x 1000) or KiB, MiB, GiB, TiB, PiB (x 1024), such as 80GiB",
                    text);
}

Expected<double> parse_seconds(std::string_view text) {
  const std::optional<double> amount = parse_amount(text, kTimeUnits);
  if (amount) return *amount;
  return make_error(
      ErrorCode::kBadInput,
      "'{}' is not a time, wanted a number, 0 or more, and ns, us, ms, s, min or h, such as 20us",
      text);
}

Expected<double> parse_bytes_per_second(std::string_view text) {
  std::string_view amount_text = trimmed(text);
  if (amount_text.ends_with("/s")) amount_text.remove_suffix(2);
  const std::optional<double> amount = parse_amount(amount_text, kByteUnits);
  if (amount) return *amount;
  return make_error(ErrorCode::kBadInput,
                    "'{}' is not a bandwidth, wanted bytes a second (bits / 8) as a number, 0 or "
                    "more, and B/s, MB/s, GB/s or GiB/s, such as 50GB/s",
                    text);
}

}  // namespace dynmo
