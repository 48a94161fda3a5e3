// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sorts by an integer key. The keys of many entries take most of the memory. So large parts are
// sorted in place, from the highest digit on (American flag sort). Parts that fit the processor's
// cache are sorted from the lowest digit on, to a buffer of their size and back.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace dynmo::tensor {

template <typename Element>
class KeySorter {
 public:
  // Sorts `elements`, whose keys differ only in the lowest `bits` bits.
  void sort(std::span<Element> elements, int bits) {
    if (bits <= 0 || elements.size() < 2) return;
    if (elements.size() <= kFew) {
      std::sort(elements.begin(), elements.end(),
                [](const Element& a, const Element& b) { return a.key < b.key; });
    } else if (elements.size() <= kBuffered) {
      sort_from_lowest(elements, bits);
    } else {
      sort_in_place(elements, bits);
    }
  }

 private:
  static constexpr std::size_t kFew = 64;
  static constexpr std::size_t kBuffered = std::size_t{1} << 15;
  static constexpr int kDigit = 8;  // bits
  static constexpr std::size_t kDigits = std::size_t{1} << kDigit;
  static constexpr std::size_t kMask = kDigits - 1;

  static std::size_t digit(const Element& element, int shift) {
    return static_cast<std::size_t>(element.key >> shift) & kMask;
  }

  void sort_from_lowest(std::span<Element> elements, int bits) {
    buffer_.resize(std::max(buffer_.size(), elements.size()));
    std::span<Element> from = elements;
    std::span<Element> to = std::span(buffer_).first(elements.size());
    for (int shift = 0; shift < bits; shift += kDigit) {
      std::array<std::uint32_t, kDigits> next{};
      for (const Element& element : from) ++next[digit(element, shift)];
      if (next[digit(from.front(), shift)] == from.size()) continue;  // all are alike
      std::uint32_t begin = 0;
      for (std::uint32_t& bucket : next) begin += std::exchange(bucket, begin);
      for (const Element& element : from) to[next[digit(element, shift)]++] = element;
      std::swap(from, to);
    }
    if (from.data() != elements.data()) std::copy(from.begin(), from.end(), elements.begin());
  }

  void sort_in_place(std::span<Element> elements, int bits) {
    const int shift = std::max(bits - kDigit, 0);
    std::array<std::size_t, kDigits + 1> begins{};
    for (const Element& element : elements) ++begins[digit(element, shift) + 1];
    for (std::size_t i = 1; i < begins.size(); ++i) begins[i] += begins[i - 1];
    std::array<std::size_t, kDigits> next{};
    std::copy(begins.begin(), begins.end() - 1, next.begin());
    for (std::size_t bucket = 0; bucket < next.size(); ++bucket) {
      while (next[bucket] < begins[bucket + 1]) {
        Element element = elements[next[bucket]];
        for (std::size_t to = digit(element, shift); to != bucket; to = digit(element, shift)) {
          std::swap(element, elements[next[to]++]);
        }
        elements[next[bucket]++] = element;
      }
    }
    for (std::size_t bucket = 0; bucket < next.size(); ++bucket) {
      sort(elements.subspan(begins[bucket], begins[bucket + 1] - begins[bucket]), shift);
    }
  }

  std::vector<Element> buffer_;
};

// Sorts elements by their member `key`, an unsigned integer of at most `bits` bits. Elements with
// equal keys come in an order that depends on the input alone.
template <typename Element>
void sort_by_key(std::span<Element> elements, int bits) {
  const auto less = [](const Element& a, const Element& b) { return a.key < b.key; };
  if (std::is_sorted(elements.begin(), elements.end(), less)) return;
  KeySorter<Element>().sort(elements, bits);
}

}  // namespace dynmo::tensor
