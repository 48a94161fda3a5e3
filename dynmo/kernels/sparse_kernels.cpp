// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/sparse_kernels.h"

#include <algorithm>
#include <cstddef>

#include "dynmo/kernels/vectors_impl.h"

namespace dynmo::kernels::sparse {
namespace {

using namespace vectors;  // NOLINT: in no header

template <typename E, std::size_t kBytes>
DYNMO_INLINE void load_tile_rows(const E* x, std::int64_t stride, std::int64_t tokens,
                                 std::int64_t width, E* tile) {
  using V = Vector<E, kBytes>;
  constexpr int kLanes = kBytes / sizeof(E);
  std::int64_t t = 0;
  for (; t + kLanes <= tokens; t += kLanes) {
    const E* from = x + t * stride;
    E* to = tile + t;
    std::int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes) {
      V square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) get(from + i * stride + d, square[i]);
      transpose<V, kLanes>(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) at<V>(to + (d + i) * kTile<E>) = square[i];
    }
    for (; d < width; ++d) {
      for (int i = 0; i < kLanes; ++i) to[d * kTile<E> + i] = from[i * stride + d];
    }
  }
  if (t == kTile<E>) return;
  for (std::int64_t d = 0; d < width; ++d) {
    for (std::int64_t i = t; i < tokens; ++i) tile[d * kTile<E> + i] = x[i * stride + d];
    std::fill(tile + d * kTile<E> + tokens, tile + (d + 1) * kTile<E>, E(0));
  }
}

template <bool kAdd, typename E, std::size_t kBytes>
DYNMO_INLINE void store_tile_rows(const E* tile, std::int64_t tokens, std::int64_t width, E* y,
                                  std::int64_t stride) {
  using V = Vector<E, kBytes>;
  constexpr int kLanes = kBytes / sizeof(E);
  const auto put_one = [](E from, E& to) { to = kAdd ? to + from : from; };
  std::int64_t t = 0;
  for (; t + kLanes <= tokens; t += kLanes) {
    const E* from = tile + t;
    E* to = y + t * stride;
    std::int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes) {
      V square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = at<V>(from + (d + i) * kTile<E>);
      transpose<V, kLanes>(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if constexpr (kAdd) {
          V row;
          get(to + i * stride + d, row);
          square[i] += row;
        }
        put(square[i], to + i * stride + d);
      }
    }
    for (; d < width; ++d) {
      for (int i = 0; i < kLanes; ++i) put_one(from[d * kTile<E> + i], to[i * stride + d]);
    }
  }
  for (; t < tokens; ++t) {
    for (std::int64_t d = 0; d < width; ++d) put_one(tile[d * kTile<E> + t], y[t * stride + d]);
  }
}

// Processes kRows rows with the same number of weights at a time, enough sums to hide the latency
// of an addition.
template <typename E, std::size_t kBytes, int kVectors, int kRows>
DYNMO_INLINE void add_times_segments(const Segment* segment, int count, const std::uint8_t* column,
                                     const E* value, const E* x_block, E* y_tile) {
  using V = Vector<E, kBytes>;
  constexpr int kLanes = kBytes / sizeof(E);
  V sum[kRows][kVectors];
  const std::uint8_t* columns[kRows];
  const E* values[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const E* y = y_tile + segment[r].row * kTile<E>;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[r][v] = at<V>(y + v * kLanes);
    columns[r] = column + r * count;
    values[r] = value + r * count;
  }
#pragma GCC unroll 1
  for (int k = 0; k < count; ++k) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const E* x = x_block + columns[r][k] * kTile<E>;
      const E weight = values[r][k];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] += weight * at<V>(x + v * kLanes);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    E* y = y_tile + segment[r].row * kTile<E>;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) at<V>(y + v * kLanes) = sum[r][v];
  }
}

template <typename E, std::size_t kBytes>
DYNMO_INLINE void add_times_rows(std::span<const Segment> segments, const std::uint8_t* column,
                                 const E* value, const E* x_block, E* y_tile) {
  constexpr int kLanes = kBytes / sizeof(E);
  constexpr int kAll = kTile<E> / kLanes;  // vectors of a tile's row
  constexpr int kVectors = std::min(kAll, 8);
  constexpr int kRows = kAll < 8 ? 8 / kAll : 1;
  for (int v = 0; v < kAll; v += kVectors) {
    const E* x = x_block + v * kLanes;
    E* y = y_tile + v * kLanes;
    const std::uint8_t* columns = column;
    const E* values = value;
    std::size_t rows = 0;
    for (std::size_t s = 0; s < segments.size(); s += rows) {
      const Segment* segment = segments.data() + s;
      const int count = segment->count;
      if (kRows > 1 && s + kRows <= segments.size() && segment[kRows - 1].count == count) {
        rows = kRows;
        add_times_segments<E, kBytes, kVectors, kRows>(segment, count, columns, values, x, y);
      } else {
        rows = 1;
        add_times_segments<E, kBytes, kVectors, 1>(segment, count, columns, values, x, y);
      }
      columns += rows * static_cast<std::size_t>(count);
      values += rows * static_cast<std::size_t>(count);
    }
  }
}

// Sums the lanes of each of kSums = 16 / sizeof(E) vectors, which are overwritten.
template <typename V, std::size_t... i>
DYNMO_INLINE void fold_lanes(V* sums, std::index_sequence<i...>) {
  constexpr int kLanes = sizeof...(i);
  V low;
  V high;
  if constexpr (sizeof(V) / kLanes == 4) {
    // For each four lanes: a0 b0 a1 b1 + a2 b2 a3 b3, then a b c d.
    for (int pair = 0; pair < 4; pair += 2) {
      low = __builtin_shufflevector(sums[pair], sums[pair + 1],
                                    static_cast<int>(i / 4 * 4 + i % 4 / 2 + i % 2 * kLanes)...);
      high =
          __builtin_shufflevector(sums[pair], sums[pair + 1],
                                  static_cast<int>(i / 4 * 4 + 2 + i % 4 / 2 + i % 2 * kLanes)...);
      sums[pair] = low + high;
    }
    low = __builtin_shufflevector(sums[0], sums[2],
                                  static_cast<int>(i / 4 * 4 + i % 2 + i % 4 / 2 * kLanes)...);
    high = __builtin_shufflevector(sums[0], sums[2],
                                   static_cast<int>(i / 4 * 4 + 2 + i % 2 + i % 4 / 2 * kLanes)...);
  } else {
    low =
        __builtin_shufflevector(sums[0], sums[1], static_cast<int>(i / 2 * 2 + i % 2 * kLanes)...);
    high = __builtin_shufflevector(sums[0], sums[1],
                                   static_cast<int>(i / 2 * 2 + 1 + i % 2 * kLanes)...);
  }
  sums[0] = low + high;
}

template <typename E, std::size_t kBytes>
DYNMO_INLINE void add_halves(const Vector<E, kBytes>& sum, E* result) {
  constexpr int kLanes = kBytes / sizeof(E);
  if constexpr (kBytes == 16) {
    Vector<E, 16> before;
    get(result, before);
    put(before + sum, result);
  } else {
    using Half = Vector<E, kBytes / 2>;
    Half half;
    [&]<std::size_t... i>(std::index_sequence<i...>) __attribute__((always_inline)) {
      half = __builtin_shufflevector(sum, sum, static_cast<int>(i)...) +
             __builtin_shufflevector(sum, sum, static_cast<int>(i + kLanes / 2)...);
    }
    (std::make_index_sequence<kLanes / 2>());
    add_halves<E, kBytes / 2>(half, result);
  }
}

// Sets `sum` to the sum of the products of kVectors vectors, lane by lane.
template <typename V, int kVectors, typename E>
DYNMO_INLINE void dot(const V* slope, const E* x, V& sum) {
  sum = slope[0] * at<V>(x);
#pragma GCC unroll 8
  for (int v = 1; v < kVectors; ++v) sum += slope[v] * at<V>(x + v * (sizeof(V) / sizeof(E)));
}

// Processes kSums weights at a time, and then sums their lanes together.
template <typename E, std::size_t kBytes>
DYNMO_INLINE void add_dots_rows(std::span<const Segment> segments, const std::uint8_t* column,
                                const E* dy_tile, const E* x_block, E* gradient) {
  using V = Vector<E, kBytes>;
  constexpr int kLanes = kBytes / sizeof(E);
  constexpr int kAll = kTile<E> / kLanes;
  constexpr int kVectors = std::min(kAll, 8);
  constexpr int kSums = 16 / sizeof(E);
  for (int first = 0; first < kAll; first += kVectors) {
    const E* x_part = x_block + first * kLanes;
    const std::uint8_t* columns = column;
    E* gradients = gradient;
    for (const Segment& segment : segments) {
      const E* dy = dy_tile + segment.row * kTile<E> + first * kLanes;
      V slope[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) slope[v] = at<V>(dy + v * kLanes);
      const int count = segment.count;
      int k = 0;
#pragma GCC unroll 1
      for (; k + kSums <= count; k += kSums) {
        V sums[kSums];
#pragma GCC unroll 4
        for (int q = 0; q < kSums; ++q) {
          dot<V, kVectors>(slope, x_part + columns[k + q] * kTile<E>, sums[q]);
        }
        fold_lanes(sums, std::make_index_sequence<kLanes>());
        add_halves<E, kBytes>(sums[0], gradients + k);
      }
      if (k < count) {
        V sums[kSums];
#pragma GCC unroll 4
        for (int q = 0; q < kSums; ++q) {
          sums[q] = V{};
          if (k + q < count) {
            dot<V, kVectors>(slope, x_part + columns[k + q] * kTile<E>, sums[q]);
          }
        }
        fold_lanes(sums, std::make_index_sequence<kLanes>());
        E last[kSums] = {};
        add_halves<E, kBytes>(sums[0], last);
        for (int q = 0; k + q < count; ++q) gradients[k + q] += last[q];
      }
      columns += count;
      gradients += count;
    }
  }
}

}  // namespace

#define DYNMO_DEFINE_KERNELS(E, name, bytes, ...)                                           \
  namespace name {                                                                          \
  __VA_ARGS__ void load_tile(const E* x, std::int64_t stride, std::int64_t tokens,          \
                             std::int64_t width, E* tile) {                                 \
    load_tile_rows<E, bytes>(x, stride, tokens, width, tile);                               \
  }                                                                                         \
  __VA_ARGS__ void store_tile(const E* tile, std::int64_t tokens, std::int64_t width, E* y, \
                              std::int64_t stride) {                                        \
    store_tile_rows<false, E, bytes>(tile, tokens, width, y, stride);                       \
  }                                                                                         \
  __VA_ARGS__ void add_tile(const E* tile, std::int64_t tokens, std::int64_t width, E* y,   \
                            std::int64_t stride) {                                          \
    store_tile_rows<true, E, bytes>(tile, tokens, width, y, stride);                        \
  }                                                                                         \
  __VA_ARGS__ void add_times(std::span<const Segment> segments, const std::uint8_t* column, \
                             const E* value, const E* x_block, E* y_tile) {                 \
    add_times_rows<E, bytes>(segments, column, value, x_block, y_tile);                     \
  }                                                                                         \
  __VA_ARGS__ void add_dots(std::span<const Segment> segments, const std::uint8_t* column,  \
                            const E* dy_tile, const E* x_block, E* gradient) {              \
    add_dots_rows<E, bytes>(segments, column, dy_tile, x_block, gradient);                  \
  }                                                                                         \
  constexpr Kernels<E> kernels_of(E) {                                                      \
    return {load_tile, store_tile, add_tile, add_times, add_dots};                          \
  }                                                                                         \
  }

namespace {
DYNMO_DEFINE_KERNELS(float, any, 16)
DYNMO_DEFINE_KERNELS(double, any, 16)
#if defined(__x86_64__) && defined(__GNUC__)
DYNMO_DEFINE_KERNELS(float, avx2, 32, [[gnu::target("avx2,fma")]])
DYNMO_DEFINE_KERNELS(double, avx2, 32, [[gnu::target("avx2,fma")]])
DYNMO_DEFINE_KERNELS(float, avx512, 64, [[gnu::target("avx512f")]])
DYNMO_DEFINE_KERNELS(double, avx512, 64, [[gnu::target("avx512f")]])
#endif

template <typename E>
const Kernels<E>& kernels_of(InstructionSet set) {
#if defined(__x86_64__) && defined(__GNUC__)
  static constexpr Kernels<E> kTable[] = {any::kernels_of(E()), avx2::kernels_of(E()),
                                          avx512::kernels_of(E())};
#else
  static constexpr Kernels<E> kTable[] = {any::kernels_of(E()), any::kernels_of(E()),
                                          any::kernels_of(E())};
#endif
  return kTable[static_cast<int>(set)];
}
}  // namespace

InstructionSet instruction_set() {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f") != 0) return InstructionSet::kAvx512;
  if (__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0) {
    return InstructionSet::kAvx2;
  }
#endif
  return InstructionSet::kAny;
}

template <>
const Kernels<float>& kernels<float>(InstructionSet set) {
  return kernels_of<float>(set);
}
template <>
const Kernels<double>& kernels<double>(InstructionSet set) {
  return kernels_of<double>(set);
}

}  // namespace dynmo::kernels::sparse
