// SPDX-License-Identifier: Apache-2.0
#pragma once

// 128-bit XXH3 digests of plans, of layers in flight and of checkpoint files. Ranks compare the
// digests of their plans. They are not cryptographic: they detect accidents, not attackers.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace dynmo {

struct Digest {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  friend bool operator==(Digest, Digest) = default;
  [[nodiscard]] std::string hex() const;  // 32 lower-case digits
};

// Parses a digest that hex() printed. Returns nullopt for anything but 32 lower-case hexadecimal
// digits.
[[nodiscard]] std::optional<Digest> parse_digest(std::string_view hex);

[[nodiscard]] Digest digest_of(std::span<const std::byte> bytes);
[[nodiscard]] Digest digest_of(std::string_view text);

// Computes the digest of a sequence of pieces. It equals digest_of() of the concatenated pieces.
class Digester {
 public:
  Digester();
  ~Digester();
  Digester(const Digester&) = delete;
  Digester& operator=(const Digester&) = delete;
  void update(std::span<const std::byte> bytes);
  void update(std::string_view text);
  [[nodiscard]] Digest digest() const;

 private:
  void* state_;  // XXH3_state_t, kept out of the header
};

}  // namespace dynmo
