// SPDX-License-Identifier: Apache-2.0
#pragma once

// Loops of sparse_products.cpp over tiles of activations.
//
// A tile holds kTile tokens of a matrix [N, D] transposed: D rows of kTile elements. So one kept
// weight multiplies a few whole vectors, each loaded for one multiply-add.
//
// The loops pass over blocks of kBlock columns, whose part of the tile fits the first cache. They
// read columns and values in storage order. Inside a block, rows are sorted by their number of
// weights there, so that the processor can predict where a row ends.

#include <cstdint>
#include <span>

namespace dynmo::kernels::sparse {

template <typename Element>
inline constexpr std::int64_t kTile = 256 / sizeof(Element);  // tokens: 64 of fp32, 32 of fp64
inline constexpr std::int64_t kBlock = 128;                   // columns
inline constexpr std::int64_t kGroup = 512;                   // rows

// The kept weights of one row of a group in one block of columns.
struct Segment {
  std::uint16_t row;    // row of the group
  std::uint16_t count;  // at least 1
};

enum class InstructionSet { kAny, kAvx2, kAvx512 };

// Returns the widest set of this processor.
[[nodiscard]] InstructionSet instruction_set();

// The loops of one instruction set. Matrices without a stride are contiguous. Tiles are aligned to
// 64 bytes.
template <typename Element>
struct Kernels {
  // Loads at most kTile rows of x, `stride` apart: tile_DT = x_TD^T, with zeros for missing rows.
  void (*load_tile)(const Element* x, std::int64_t stride, std::int64_t tokens, std::int64_t width,
                    Element* tile);
  // Sets y_TD = tile_DT^T, or y_TD += tile_DT^T, for the first `tokens` columns of the tile.
  void (*store_tile)(const Element* tile, std::int64_t tokens, std::int64_t width, Element* y,
                     std::int64_t stride);
  void (*add_tile)(const Element* tile, std::int64_t tokens, std::int64_t width, Element* y,
                   std::int64_t stride);
  // Multiplies the weights of a cell, segment after segment: y_tile[row] += value *
  // x_block[column].
  void (*add_times)(std::span<const Segment> segments, const std::uint8_t* column,
                    const Element* value, const Element* x_block, Element* y_tile);
  // Adds to the gradients of a cell's weights: gradient += dy_tile[row] . x_block[column].
  void (*add_dots)(std::span<const Segment> segments, const std::uint8_t* column,
                   const Element* dy_tile, const Element* x_block, Element* gradient);
};

// Returns the loops of a set. Requires a set that this processor has, or kAny if the compiler knows
// no other.
template <typename Element>
[[nodiscard]] const Kernels<Element>& kernels(InstructionSet set);
template <>
const Kernels<float>& kernels<float>(InstructionSet set);
template <>
const Kernels<double>& kernels<double>(InstructionSet set);

}  // namespace dynmo::kernels::sparse
