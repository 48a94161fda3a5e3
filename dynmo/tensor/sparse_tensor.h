// SPDX-License-Identifier: Apache-2.0
#pragma once

// A sparse tensor in coordinates. Dynamic loads are such tensors: counts of tokens by [step, block,
// expert], costs by [step, layer], traffic by [step, from, to].
//
// Coordinate files (.tns, as FROSTT distributes them) have a line for each entry, with its indices
// from 1 and its value, separated by blanks. Lines that begin with # are comments. The sizes of the
// modes may come first, alone or after a line with their number. Without them a mode is as large as
// its largest index.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo::tensor {

inline constexpr int kMaxOrder = 16;
inline constexpr std::uint64_t kMaxSize = std::uint64_t{1} << 32;  // size of a mode

struct SparseTensor {
  std::vector<std::uint64_t> sizes;                 // by mode
  std::vector<std::string> names = {};              // by mode; empty if modes have numbers only
  std::vector<std::vector<std::uint32_t>> indices;  // by mode, then by entry; from 0
  std::vector<double> values = {};                  // by entry; empty if only places count

  [[nodiscard]] int order() const { return static_cast<int>(sizes.size()); }
  [[nodiscard]] std::size_t entries() const { return indices.empty() ? 0 : indices.front().size(); }
};

enum class Values { kDropped, kKept };

// Parses any bytes as a coordinate file.
//
// Fails with kBadInput, which names `origin`, the line and the fault. Faults of numbers are a
// different count than in earlier lines, a value above 1e100 or NaN, and more than kMaxOrder modes.
// Faults of an index are 0, a number beyond its declared size, and one above kMaxSize. A text
// without entries is a fault, too.
[[nodiscard]] Expected<SparseTensor> parse_coordinates(std::string_view text,
                                                       std::string_view origin,
                                                       Values values = Values::kDropped);
// Reads a coordinate file in pieces, so memory holds only the entries. Fails like
// parse_coordinates().
[[nodiscard]] Expected<SparseTensor> read_coordinates(const std::filesystem::path& path,
                                                      Values values = Values::kDropped);

}  // namespace dynmo::tensor
