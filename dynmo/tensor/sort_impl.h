// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sorts by an integer key in place, byte after byte from the highest (American flag sort), since
// the keys of many entries take most of the memory.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace dynmo::tensor {

// Elements have `key`, an unsigned integer; those of equal keys come in some order that depends on
// the input alone. `byte`: the highest one that differs.
template <typename Element>
void sort_by_key(std::span<Element> elements, int byte) {
  constexpr std::size_t kFew = 256;
  const auto less = [](const Element& a, const Element& b) { return a.key < b.key; };
  if (elements.size() <= kFew || byte < 0) {
    if (byte >= 0) std::sort(elements.begin(), elements.end(), less);
    return;
  }
  const auto digit = [byte](const Element& e) {
    return static_cast<std::size_t>((e.key >> (8 * byte)) & 0xFFU);
  };
  std::array<std::size_t, 257> begins{};
  for (const Element& element : elements) ++begins[digit(element) + 1];
  for (std::size_t i = 1; i < begins.size(); ++i) begins[i] += begins[i - 1];
  std::array<std::size_t, 256> next{};
  std::copy(begins.begin(), begins.end() - 1, next.begin());
  for (std::size_t bucket = 0; bucket < next.size(); ++bucket) {
    while (next[bucket] < begins[bucket + 1]) {
      Element element = elements[next[bucket]];
      for (std::size_t to = digit(element); to != bucket; to = digit(element)) {
        std::swap(element, elements[next[to]++]);
      }
      elements[next[bucket]++] = element;
    }
  }
  for (std::size_t bucket = 0; bucket < next.size(); ++bucket) {
    sort_by_key(elements.subspan(begins[bucket], begins[bucket + 1] - begins[bucket]), byte - 1);
  }
}

}  // namespace dynmo::tensor
