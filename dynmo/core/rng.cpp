// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/rng.h"

#include <cmath>
#include <numbers>

#include "dynmo/core/check.h"

namespace dynmo {

std::array<std::uint32_t, 4> philox(std::uint64_t key, std::array<std::uint32_t, 4> counter) {
  constexpr std::uint64_t kMultiplier0 = 0xD2511F53;
  constexpr std::uint64_t kMultiplier1 = 0xCD9E8D57;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9;
  constexpr std::uint32_t kWeyl1 = 0xBB67AE85;
  auto key0 = static_cast<std::uint32_t>(key);
  auto key1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = kMultiplier0 * counter[0];
    const std::uint64_t product1 = kMultiplier1 * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key0,
               static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key1,
               static_cast<std::uint32_t>(product0)};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

std::uint64_t mix_key(std::initializer_list<std::uint64_t> parts) {
  std::uint64_t key = 0x243F6A8885A308D3;  // digits of pi: any fixed start
  for (const std::uint64_t part : parts) {
    const auto words = philox(
        key, {static_cast<std::uint32_t>(part), static_cast<std::uint32_t>(part >> 32), 0, 0});
    key = words[0] | (std::uint64_t{words[1]} << 32);
  }
  return key;
}

std::uint64_t Rng::next() {
  if (left_ == 0) {
    const auto words = philox(key_, {static_cast<std::uint32_t>(counter_),
                                     static_cast<std::uint32_t>(counter_ >> 32), 0, 0});
    ++counter_;
    buffer_ = {words[0] | (std::uint64_t{words[1]} << 32),
               words[2] | (std::uint64_t{words[3]} << 32)};
    left_ = 2;
  }
  return buffer_[2 - left_--];
}

double Rng::uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

double Rng::normal() {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

std::uint64_t Rng::below(std::uint64_t bound) {
  DYNMO_CHECK(bound >= 1, "a bound of at least 1, got {}", bound);
  // Rejects the few values that would make the first residues likelier.
  const std::uint64_t limit = max() - max() % bound;
  std::uint64_t draw = next();
  while (draw >= limit) draw = next();
  return draw % bound;
}

namespace {

// Enough rounds that no structure is visible on the smallest domains (sampler_test.cpp).
constexpr std::uint32_t kRounds = 8;

// Returns a number in [0, bound), uniform except for a bias of at most bound / 2^64.
std::uint64_t round_value(std::uint64_t key, std::uint32_t round, std::uint64_t half,
                          std::uint64_t bound) {
  const auto words = philox(
      key, {static_cast<std::uint32_t>(half), static_cast<std::uint32_t>(half >> 32), round, 0});
  return (words[0] | (std::uint64_t{words[1]} << 32)) % bound;
}

// Returns the smallest a with a * a >= size.
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
