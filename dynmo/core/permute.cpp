// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/permute.h"

#include <cmath>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"

namespace dynmo {
namespace {

// Enough rounds that no structure is visible on the smallest domains (sampler_test.cpp).
constexpr std::uint32_t kRounds = 8;

// Uniform in [0, bound) but for a bias of at most bound / 2^64.
std::uint64_t round_value(std::uint64_t key, std::uint32_t round, std::uint64_t half,
                          std::uint64_t bound) {
  const auto words = philox(
      key, {static_cast<std::uint32_t>(half), static_cast<std::uint32_t>(half >> 32), round, 0});
  return (words[0] | (std::uint64_t{words[1]} << 32)) % bound;
}

// Smallest a with a * a >= size.
std::uint64_t root_above(std::uint64_t size) {
  auto root = static_cast<std::uint64_t>(std::sqrt(static_cast<double>(size)));
  while (root * root < size) ++root;
  while (root > 1 && (root - 1) * (root - 1) >= size) --root;
  return root;
}

}  // namespace

std::uint64_t permute(std::uint64_t index, std::uint64_t size, std::uint64_t key) {
  DYNMO_CHECK(size >= 1 && size < (std::uint64_t{1} << 62) && index < size,
              "an index below {}, got {}", size, index);
  const std::uint64_t a = root_above(size);
  const std::uint64_t b = (size + a - 1) / a;
  // At most a - 1 points lie outside [0, size): the walk seldom takes a second step.
  do {
    std::uint64_t left = index % a;
    std::uint64_t right = index / a;
    for (std::uint32_t round = 0; round < kRounds; round += 2) {
      left = (left + round_value(key, round, right, a)) % a;
      right = (right + round_value(key, round + 1, left, b)) % b;
    }
    index = right * a + left;
  } while (index >= size);
  return index;
}

}  // namespace dynmo
