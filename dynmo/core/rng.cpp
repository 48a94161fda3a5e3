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

}  // namespace dynmo
