// SPDX-License-Identifier: Apache-2.0
#pragma once

// A permutation of the numbers below a size, computed one image after another without a list of
// them. It gives counts an order that shows no pattern. The permutation of core/rng.h mixes as
// well as Rng does and takes ten times as long.

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace dynmo::tensor {

class Shuffle {
 public:
  // Makes the permutation. Requires 1 <= size <= 2^62.
  Shuffle(std::uint64_t size, std::uint64_t key) : size_(size) {
    width_ = static_cast<std::uint64_t>(std::sqrt(static_cast<double>(size)));
    while (width_ * width_ < size) ++width_;
    height_ = (size + width_ - 1) / width_;
    for (std::uint64_t& round : keys_) round = key = mixed(key + 0x9e3779b97f4a7c15U);
  }

  // Returns the image of 0 at the first call, of 1 at the next, and so on. Requires fewer than
  // `size` calls before.
  //
  // It is a Feistel network over the cells of a rectangle that hardly exceeds the size. A cell
  // outside the size goes through the network again.
  [[nodiscard]] std::uint64_t next() {
    std::uint64_t column = column_;
    std::uint64_t row = row_;
    if (++column_ == width_) {
      column_ = 0;
      ++row_;
    }
    do {
      for (std::size_t round = 0; round < keys_.size(); round += 2) {
        column += below(width_, mixed(row ^ keys_[round]));
        if (column >= width_) column -= width_;
        row += below(height_, mixed(column ^ keys_[round + 1]));
        if (row >= height_) row -= height_;
      }
    } while (row * width_ + column >= size_);
    return row * width_ + column;
  }

 private:
  static std::uint64_t mixed(std::uint64_t bits) {
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
    return bits ^ (bits >> 31);
  }
  // Returns floor(bound x bits / 2^64), a number below `bound`.
  static std::uint64_t below(std::uint64_t bound, std::uint64_t bits) {
    __extension__ using Product = unsigned __int128;
    return static_cast<std::uint64_t>((Product{bits} * bound) >> 64);
  }

  std::uint64_t size_;
  std::uint64_t width_ = 0;
  std::uint64_t height_ = 0;
  std::uint64_t column_ = 0;  // column of the next number
  std::uint64_t row_ = 0;
  std::array<std::uint64_t, 4> keys_{};
};

}  // namespace dynmo::tensor
