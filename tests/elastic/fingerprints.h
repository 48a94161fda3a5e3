// SPDX-License-Identifier: Apache-2.0
#pragma once

// A set of 64-bit hashes of states, eight to twelve bytes each, in place of the states.
//
// Two states of one hash are taken for one. Among n states that happens with probability n^2 /
// 2^65: at 100 million 3 in 10,000, and then one state out of all is not looked at.

#include <cstdint>
#include <utility>
#include <vector>

namespace dynmo::elastic {

class Fingerprints {
 public:
  // Whether it was not there.
  bool insert(std::uint64_t hash) {
    if (hash == 0) hash = 1;  // 0 marks an empty place
    if (4 * (size_ + 1) > 3 * static_cast<std::int64_t>(places_.size())) grow();
    if (!put(hash)) return false;
    ++size_;
    return true;
  }
  [[nodiscard]] bool has(std::uint64_t hash) const {
    if (hash == 0) hash = 1;
    std::uint64_t at = hash & (places_.size() - 1);
    while (places_[at] != 0 && places_[at] != hash) at = (at + 1) & (places_.size() - 1);
    return places_[at] == hash;
  }
  [[nodiscard]] std::int64_t size() const { return size_; }

 private:
  bool put(std::uint64_t hash) {
    std::uint64_t at = hash & (places_.size() - 1);
    while (places_[at] != 0) {
      if (places_[at] == hash) return false;
      at = (at + 1) & (places_.size() - 1);
    }
    places_[at] = hash;
    return true;
  }
  void grow() {
    const std::vector<std::uint64_t> old =
        std::exchange(places_, std::vector<std::uint64_t>(2 * places_.size()));
    for (const std::uint64_t hash : old) {
      if (hash != 0) put(hash);
    }
  }

  std::vector<std::uint64_t> places_ = std::vector<std::uint64_t>(1 << 12);
  std::int64_t size_ = 0;
};

}  // namespace dynmo::elastic
