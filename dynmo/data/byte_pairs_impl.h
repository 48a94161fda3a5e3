// SPDX-License-Identifier: Apache-2.0
#pragma once

// Byte-pair encoding of one piece of text. The merge of the lowest rank comes first, and among
// equal ones the leftmost.

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace dynmo::data {

// Two tokens that become one token. The rank of a merge is its place in the list of merges.
struct TokenMerge {
  std::int32_t left = 0;
  std::int32_t right = 0;
  std::int32_t made = 0;
};

// Encodes text by byte pairs. Immutable: any number of threads may use one, each with a Scratch of
// its own.
class BytePairs {
 public:
  // Memory that encode() keeps between calls. It also holds the tokens of short pieces, as text
  // repeats its words. It must not be used with another BytePairs.
  struct Scratch {
    struct Cached {
      static constexpr std::size_t kMaxBytes = 30;
      static constexpr std::size_t kMaxTokens = 8;
      std::array<std::int32_t, kMaxTokens> tokens{};
      std::array<char, kMaxBytes> text{};
      std::uint8_t bytes = 0;
      std::uint8_t count = 0;  // of the tokens; 0 is an unused entry
    };
    struct Node {  // of a long piece: a token, and the places of its neighbours
      std::int32_t token = 0;
      std::int32_t before = -1;
      std::int32_t behind = -1;
    };
    struct Candidate {
      std::int32_t rank = 0;
      std::int32_t place = 0;
      std::int32_t right = 0;  // token at that time
    };
    std::vector<Cached> cache;
    std::vector<Node> nodes;
    std::vector<Candidate> heap;
  };

  // Makes the tables. `bytes` has the token of each byte. `whole` has the pieces that become a
  // token without merges.
  BytePairs(const std::array<std::int32_t, 256>& bytes, std::span<const TokenMerge> merges,
            std::unordered_map<std::string, std::int32_t> whole);

  // Appends the tokens of `piece`. Takes O(n log n) for n bytes.
  void encode(std::string_view piece, Scratch& scratch, std::vector<std::int32_t>& tokens) const;

 private:
  struct Slot {
    std::uint64_t pair = 0;
    std::int32_t rank = 0;
    std::int32_t made = -1;  // -1 is a free slot
  };

  [[nodiscard]] const Slot* find(std::int32_t left, std::int32_t right) const;
  void merge_short(std::string_view piece, std::vector<std::int32_t>& tokens) const;
  void merge_long(std::string_view piece, Scratch& scratch,
                  std::vector<std::int32_t>& tokens) const;
  void merge(std::string_view piece, Scratch& scratch, std::vector<std::int32_t>& tokens) const;

  std::array<std::int32_t, 256> bytes_;
  std::vector<Slot> slots_;  // open addressing; the size is a power of two
  int shift_ = 0;
  std::unordered_map<std::string, std::int32_t> whole_;
};

}  // namespace dynmo::data
