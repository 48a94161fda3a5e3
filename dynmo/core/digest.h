// SPDX-License-Identifier: Apache-2.0
#pragma once

// 128-bit XXH3 digests: of plans (so that ranks can compare what they derived), of layers in
// flight, of checkpoint files. Not cryptographic: they catch accidents, not attackers.

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

// The digest that hex() printed; nullopt for anything but 32 lower-case hexadecimal digits.
[[nodiscard]] std::optional<Digest> parse_digest(std::string_view hex);

[[nodiscard]] Digest digest_of(std::span<const std::byte> bytes);
[[nodiscard]] Digest digest_of(std::string_view text);

// Digest of a sequence of pieces; equal to digest_of the pieces put together.
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
