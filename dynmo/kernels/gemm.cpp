// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/gemm.h"

#include <algorithm>
#include <array>
#include <utility>

#include "dynmo/kernels/vectors_impl.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define DYNMO_512_BITS [[gnu::target("avx512f")]]
#else
#define DYNMO_512_BITS
#endif

namespace dynmo::kernels::gemm {
namespace {

using Index = std::int64_t;
using V = vectors::Vector<float, 64>;
constexpr int kLanes = 16;
constexpr int kRows = 12;        // at most, of a block
constexpr Index kDepth = 320;    // at most, of a panel: 40 KiB
constexpr Index kRowsOfA = 512;  // which stay in the second cache

// Sets c = a panel, or c += a panel, for kCount rows and the panel's first `width` columns.
template <int kCount, bool kTransposed>
DYNMO_512_BITS void block(Index depth, const float* a, Index a_stride, const float* panel,
                          Result result, float* c, Index c_stride, Index width) {
  V sums[kCount][2] = {};
  for (Index k = 0; k < depth; ++k) {
    const V& left = vectors::at<V>(panel + k * kColumns);
    const V& right = vectors::at<V>(panel + k * kColumns + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const float x = kTransposed ? a[k * a_stride + i] : a[i * a_stride + k];
      sums[i][0] += x * left;
      sums[i][1] += x * right;
    }
  }
  if (width == kColumns) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        float* to = c + i * c_stride + half * kLanes;
        if (result == Result::kAddTo) {
          V old;
          vectors::get(to, old);
          sums[i][half] += old;
        }
        vectors::put(sums[i][half], to);
      }
    }
    return;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    float row[kColumns];
    vectors::put(sums[i][0], row);
    vectors::put(sums[i][1], row + kLanes);
    float* to = c + i * c_stride;
    for (Index n = 0; n < width; ++n) to[n] = result == Result::kAddTo ? to[n] + row[n] : row[n];
  }
}

using Block = void (*)(Index, const float*, Index, const float*, Result, float*, Index, Index);
template <bool kTransposed, int... i>
constexpr std::array<Block, sizeof...(i)> blocks(std::integer_sequence<int, i...>) {
  return {block<i + 1, kTransposed>...};
}

// Packs `depth` rows of b from `row` on and `width` columns from `column` on. Missing columns
// become zeros.
DYNMO_512_BITS void pack(const MatrixView<float>& b, Index row, Index depth, Index column,
                         Index width, float* panel) {
  const float* from = b.data + row * b.stride + column;
  for (Index k = 0; k < depth; ++k, from += b.stride, panel += kColumns) {
    if (width == kColumns) {
      V halves[2];
      vectors::get(from, halves[0]);
      vectors::get(from + kLanes, halves[1]);
      vectors::at<V>(panel) = halves[0];
      vectors::at<V>(panel + kLanes) = halves[1];
    } else {
      std::fill(std::copy_n(from, width, panel), panel + kColumns, 0.0F);
    }
  }
}

// Like pack(), for a transposed b, square by square.
DYNMO_512_BITS void pack_transposed(const MatrixView<float>& b, Index row, Index depth,
                                    Index column, Index width, float* panel) {
  const float* from = b.data + column * b.stride + row;
  for (Index half = 0; half < kColumns; half += kLanes) {
    Index k = 0;
    for (; half + kLanes <= width && k + kLanes <= depth; k += kLanes) {
      V square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) vectors::get(from + (half + i) * b.stride + k, square[i]);
      vectors::transpose<V, kLanes>(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        vectors::at<V>(panel + (k + i) * kColumns + half) = square[i];
      }
    }
    for (; k < depth; ++k) {
      for (Index n = half; n < half + kLanes; ++n) {
        panel[k * kColumns + n] = n < width ? from[n * b.stride + k] : 0.0F;
      }
    }
  }
}

}  // namespace

bool is_possible() {
#if defined(__x86_64__) && defined(__GNUC__)
  return __builtin_cpu_supports("avx512f") != 0;
#else
  return true;
#endif
}

bool is_wanted() {
#if defined(__x86_64__) && defined(__GNUC__)
  // g++ 12 has no name for Zen 5, the first of AMD's with this instruction.
  static const bool kWanted = is_possible() && __builtin_cpu_is("amd") != 0 &&
                              __builtin_cpu_supports("avx512vp2intersect") != 0;
  return kWanted;
#else
  return false;
#endif
}

void multiply(const Range& part, std::int64_t depth, const MatrixView<float>& a,
              const MatrixView<float>& b, Result result, float* c, std::int64_t c_stride) {
  using Counts = std::make_integer_sequence<int, kRows>;
  static constexpr auto kBlocks = blocks<false>(Counts());
  static constexpr auto kTransposedBlocks = blocks<true>(Counts());
  const auto& by_rows = a.transposed ? kTransposedBlocks : kBlocks;
  alignas(64) float panel[kDepth * kColumns];
  const Index pieces = std::max<Index>((depth + kDepth - 1) / kDepth, 1);
  const Index length = (depth + pieces - 1) / pieces;
  for (Index first = part.first_row; first < part.end_row; first += kRowsOfA) {
    const Index end = std::min(first + kRowsOfA, part.end_row);
    for (Index piece = 0; piece < pieces; ++piece) {
      const Index k = piece * length;
      const Index here = std::min(length, depth - k);
      const Result then = piece > 0 ? Result::kAddTo : result;
      for (Index n = part.first_column; n < part.end_column; n += kColumns) {
        const Index width = std::min(kColumns, part.end_column - n);
        (b.transposed ? pack_transposed : pack)(b, k, here, n, width, panel);
        // Blocks are as equal as possible.
        Index left = (end - first + kRows - 1) / kRows;
        for (Index m = first; m < end; --left) {
          const Index rows = (end - m + left - 1) / left;
          const float* from = a.data + (a.transposed ? k * a.stride + m : m * a.stride + k);
          by_rows[static_cast<std::size_t>(rows - 1)](here, from, a.stride, panel, then,
                                                      c + m * c_stride + n, c_stride, width);
          m += rows;
        }
      }
    }
  }
}

}  // namespace dynmo::kernels::gemm
