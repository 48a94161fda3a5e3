// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "dynmo/checkpoint/safetensors.h"

namespace dynmo::checkpoint {
namespace {

struct Row {
  std::string_view name;
  int bits;
};

// The rows are in the order of DType.
constexpr std::array<Row, 22> kRows = {
    {{"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
     {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
     {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
     {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
     {"I64", 64},        {"U64", 64}}};
static_assert(static_cast<std::size_t>(DType::kU64) + 1 == kRows.size());

}  // namespace

std::string_view name(DType dtype) { return kRows.at(static_cast<std::size_t>(dtype)).name; }

int bits(DType dtype) { return kRows.at(static_cast<std::size_t>(dtype)).bits; }

std::optional<DType> parse_dtype(std::string_view name) {
  for (std::size_t i = 0; i < kRows.size(); ++i) {
    if (kRows[i].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

std::optional<std::uint64_t> bytes_of(DType dtype, std::span<const std::int64_t> shape) {
  std::uint64_t total = static_cast<std::uint64_t>(bits(dtype));
  // Counts bits, and multiplies in the format's order: {2^62, 4, 0} overflows although it is empty.
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(total, static_cast<std::uint64_t>(size), &total)) {
      return std::nullopt;
    }
  }
  if (total % 8 != 0) return std::nullopt;
  return total / 8;
}

}  // namespace dynmo::checkpoint
