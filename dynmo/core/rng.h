// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random numbers as a function of a key, the same on every machine and library. A draw is a pure
// function of (key, counter), so moving a layer or a sample changes no number. The function is
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).

#include <array>
#include <cstdint>
#include <initializer_list>

namespace dynmo {

// Returns the four 32-bit words of block `counter` under `key`.
[[nodiscard]] std::array<std::uint32_t, 4> philox(std::uint64_t key,
                                                  std::array<std::uint32_t, 4> counter);

// Combines several numbers into a key, such as {seed, layer, step, micro-batch}. The order matters.
[[nodiscard]] std::uint64_t mix_key(std::initializer_list<std::uint64_t> parts);

// A stream of draws under one key. A copy continues with the same draws.
class Rng {
 public:
  explicit Rng(std::uint64_t key) : key_(key) {}

  [[nodiscard]] std::uint64_t next();                      // 64 uniform bits
  [[nodiscard]] double uniform();                          // in [0, 1), 53 bits
  [[nodiscard]] double normal();                           // Box-Muller, with the host's libm
  [[nodiscard]] std::uint64_t below(std::uint64_t bound);  // in [0, bound), unbiased; bound >= 1

  // Interface of a standard generator, for our own algorithms. The standard's differ between
  // libraries.
  using result_type = std::uint64_t;
  static constexpr result_type min() { return 0; }
  static constexpr result_type max() { return ~result_type{0}; }
  result_type operator()() { return next(); }

 private:
  std::uint64_t key_;
  std::uint64_t counter_ = 0;
  std::array<std::uint64_t, 2> buffer_{};
  unsigned left_ = 0;
};

// Returns the image of `index` under the permutation of [0, size) that `key` names. Requires 0 <=
// index < size. Takes less than a microsecond.
[[nodiscard]] std::uint64_t permute(std::uint64_t index, std::uint64_t size, std::uint64_t key);

}  // namespace dynmo
