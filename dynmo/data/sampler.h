// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tokens of sample i of a run, as a pure function of (seed, i). So any rank can draw any sample
// at any time, and a restarted run continues where it stopped. The number of ranks does not matter.

#include <cstdint>
#include <span>
#include <stdexcept>

#include "dynmo/core/expected.h"
#include "dynmo/data/token_shards.h"

namespace dynmo::data {

struct SamplerOptions {
  std::int64_t sequence = 0;    // T: input tokens of a sample
  std::int32_t vocabulary = 0;  // every token must be below it
  std::uint64_t seed = 0;
};

// Thrown for a token that the model does not have: the shard is of another tokenizer, or has
// changed.
struct ForeignShard : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A pass over the data visits W = (N - 1) / T windows of T + 1 tokens once each. Neighbours share
// one token, since a window's last token is only a target. Windows may cross the ends of documents
// and shards. Each pass shifts all windows by its own draw from the (N - 1) mod T tokens left over.
//
// The order is a keyed permutation of the pass, so it needs no memory and no shuffling. It is an
// alternating Feistel network on Z_a x Z_b with a * b >= W. (Black and Rogaway, "Ciphers with
// arbitrary finite domains", CT-RSA 2002.) Its round function is philox. An image is mapped again
// until it is below W.
//
// A value. Any number of threads may sample.
class Sampler {
 public:
  // Makes a sampler. Returns kBadInput if the shards have fewer than T + 1 tokens, with their
  // number. Requires T >= 1, vocabulary >= 1.
  [[nodiscard]] static Expected<Sampler> make(const TokenShards& shards,
                                              const SamplerOptions& options);

  [[nodiscard]] const TokenShards& shards() const { return shards_; }
  [[nodiscard]] std::int64_t windows() const { return windows_; }  // samples a pass
  [[nodiscard]] std::int64_t sequence() const { return options_.sequence; }

  // Returns the first token of sample `index`. Requires index >= 0.
  [[nodiscard]] std::int64_t position(std::int64_t index) const;

  // Copies the T + 1 tokens of sample `index`: inputs are the first T, targets the last T. Throws
  // ForeignShard, which names the shard, if a token is not below the vocabulary.
  void sample(std::int64_t index, std::span<std::int32_t> tokens) const;
  void sample(std::int64_t index, std::span<std::int64_t> tokens) const;

 private:
  Sampler(TokenShards shards, const SamplerOptions& options);
  void check_tokens(std::int64_t first, std::span<const std::int32_t> tokens) const;

  TokenShards shards_;
  SamplerOptions options_;
  std::int64_t windows_ = 0;
};

}  // namespace dynmo::data
