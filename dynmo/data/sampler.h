// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which tokens sample i of a run is: a pure function of (seed, i), so that any rank can draw any
// sample at any time, a restarted run goes on where it stopped, and the number of ranks changes
// nothing.

#include <cstdint>
#include <span>
#include <stdexcept>

#include "dynmo/core/expected.h"
#include "dynmo/data/token_shards.h"

namespace dynmo::data {

struct SamplerOptions {
  std::int64_t sequence = 0;    // T: inputs a sample
  std::int32_t vocabulary = 0;  // every token must be below it
  std::uint64_t seed = 0;
};

// A token that the model does not have: the shard belongs to another tokenizer, or has changed.
struct ForeignShard : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A pass over the data visits W = (N - 1) / T windows of T + 1 tokens once each; neighbours share
// one token, since a window's last token is only a target. The order is a keyed permutation of the
// pass: an alternating Feistel network on Z_a x Z_b with a * b >= W (Black and Rogaway, "Ciphers
// with arbitrary finite domains", CT-RSA 2002) whose round function is philox, walked along its
// cycle until it is below W. So it needs no memory and no shuffling. Windows run across the ends of
// documents and shards. Each pass shifts all windows by its own draw from the (N - 1) mod T tokens
// left over.
//
// A value; any number of threads may sample.
class Sampler {
 public:
  // kBadInput if the shards have fewer than T + 1 tokens (says how many). Requires T >= 1,
  // vocabulary >= 1.
  [[nodiscard]] static Expected<Sampler> make(const TokenShards& shards,
                                              const SamplerOptions& options);

  [[nodiscard]] const TokenShards& shards() const { return shards_; }
  [[nodiscard]] std::int64_t windows() const { return windows_; }  // samples a pass
  [[nodiscard]] std::int64_t sequence() const { return options_.sequence; }

  // First token of sample `index`. Requires index >= 0.
  [[nodiscard]] std::int64_t position(std::int64_t index) const;

  // The T + 1 tokens of sample `index`: inputs are the first T, targets the last T. Throws
  // ForeignShard, naming the shard, if a token is not below the vocabulary.
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
