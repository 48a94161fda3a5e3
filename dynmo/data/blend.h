// SPDX-License-Identifier: Apache-2.0
#pragma once

// Several data sets in given shares, sample by sample. Which set has sample i, and which of its
// samples that is, is a function of i. So any rank can draw any sample at any time.

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/data/sampler.h"

namespace dynmo::data {

// A set of a blend, as written: "0.3 PATH".
struct BlendPart {
  std::int64_t weight = 0;  // share = weight / sum of the weights, which have no common divisor
  std::string path;
};
inline constexpr std::int64_t kMaxBlendPeriod = 1'000'000;  // sum of the weights
inline constexpr std::size_t kMaxBlendParts = 64;

// Parses parts. Shares are decimal numbers above 0, of any sum. Returns kBadInput, which names the
// key data.blend, for anything else, or if the sum of the weights is above kMaxBlendPeriod.
[[nodiscard]] Expected<std::vector<BlendPart>> parse_blend(std::span<const std::string> texts);

// The order of the sets. In every prefix of the samples, each set differs from its share by less
// than one sample. (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980.)
// The order has a period, in samples, of the sum of the weights.
//
// A value. Any number of threads may use it.
class Blend {
 public:
  // Requires 1 to kMaxBlendParts weights above 0, and a sum of at most kMaxBlendPeriod.
  explicit Blend(std::vector<std::int64_t> weights);

  struct Place {
    std::size_t set = 0;
    std::int64_t index = 0;  // among the samples of the set
  };
  // Returns where sample `index` is. Requires index >= 0.
  [[nodiscard]] Place place(std::int64_t index) const;
  [[nodiscard]] const std::vector<std::int64_t>& weights() const { return weights_; }

 private:
  std::vector<std::int64_t> weights_;
  std::vector<std::uint8_t> sets_;    // by sample of a period
  std::vector<std::int32_t> before_;  // samples of the same set before it
};

// The tokens of sample i of a blend.
class BlendedSampler {
 public:
  // Requires a sampler for each weight, all of one sequence.
  BlendedSampler(std::vector<Sampler> samplers, Blend blend);

  [[nodiscard]] std::int64_t sequence() const { return samplers_.front().sequence(); }
  // Copies the T + 1 tokens of sample `index`, like Sampler::sample().
  void sample(std::int64_t index, std::span<std::int64_t> tokens) const;
  // Returns a digest of all sets (TokenShards::fingerprint) and their weights. A blend of one set
  // has the set's own.
  [[nodiscard]] Digest fingerprint() const;

 private:
  std::vector<Sampler> samplers_;
  Blend blend_;
};

// Returns the seed of the samples of set `set` of a blend. The first one has the run's own.
[[nodiscard]] std::uint64_t seed_of_set(std::uint64_t seed, std::size_t set);

}  // namespace dynmo::data
