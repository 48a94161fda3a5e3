// SPDX-License-Identifier: Apache-2.0
#pragma once

// Vectors of elements for kernels that are compiled once for each instruction set. Includes no
// header of libtorch.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#define DYNMO_INLINE [[gnu::always_inline]] inline

namespace dynmo::kernels::vectors {

// A vector of kBytes bytes. g++ and clang++ compile its arithmetic to the instructions of the
// function into which it is inlined. Vectors are passed by reference, because by value they have
// another ABI in each set.
template <typename E, std::size_t kBytes>
struct VectorOf {
  using Type [[gnu::vector_size(kBytes), gnu::may_alias]] = E;
};
template <typename E, std::size_t kBytes>
using Vector = typename VectorOf<E, kBytes>::Type;

template <typename V, typename E>
DYNMO_INLINE const V& at(const E* data) {
  return *reinterpret_cast<const V*>(data);
}
template <typename V, typename E>
DYNMO_INLINE V& at(E* data) {
  return *reinterpret_cast<V*>(data);
}

// Loads or stores a vector at an address that need only be a multiple of an element's size.
template <typename V, typename E>
DYNMO_INLINE void get(const E* data, V& vector) {
  std::memcpy(&vector, data, sizeof(V));
}
template <typename V, typename E>
DYNMO_INLINE void put(const V& vector, E* data) {
  std::memcpy(data, &vector, sizeof(V));
}

// Returns the shuffle indices for half `kHalf` of two interleaved vectors: a0 b0 a1 b1 ....
template <int kHalf, int kLanes, std::size_t... i>
constexpr auto interleave(std::index_sequence<i...>) {
  return std::index_sequence<(kHalf * kLanes / 2 + i / 2 + (i % 2) * kLanes)...>();
}
template <typename V, std::size_t... i>
DYNMO_INLINE void shuffle(const V& a, const V& b, V& result, std::index_sequence<i...>) {
  result = __builtin_shufflevector(a, b, static_cast<int>(i)...);
}

// Transposes a square of kLanes x kLanes elements by log2(kLanes) perfect shuffles of its rows.
template <typename V, int kLanes>
DYNMO_INLINE void transpose(V* rows) {
  using Lanes = std::make_index_sequence<kLanes>;
  V other[kLanes];
  V* from = rows;
  V* to = other;
#pragma GCC unroll 4
  for (int size = kLanes; size > 1; size /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      shuffle(from[i], from[i + kLanes / 2], to[2 * i], interleave<0, kLanes>(Lanes()));
      shuffle(from[i], from[i + kLanes / 2], to[2 * i + 1], interleave<1, kLanes>(Lanes()));
    }
    std::swap(from, to);
  }
  if (from != rows) std::copy_n(from, kLanes, rows);
}

}  // namespace dynmo::kernels::vectors
