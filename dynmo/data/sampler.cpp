// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/sampler.h"

#include <array>
#include <stdexcept>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"

namespace dynmo::data {
namespace {

// Separate streams of one (seed, pass).
constexpr std::uint64_t kOrderStream = 1;
constexpr std::uint64_t kShiftStream = 2;

}  // namespace

Expected<Sampler> Sampler::make(const TokenShards& shards, const SamplerOptions& options) {
  DYNMO_CHECK(options.sequence >= 1 && options.sequence < std::int64_t{1} << 40,
              "a sequence of 1 to 2^40 tokens, got {}", options.sequence);
  DYNMO_CHECK(options.vocabulary >= 1, "a vocabulary, got {}", options.vocabulary);
  if (shards.tokens() - 1 < options.sequence) {
    return make_error(ErrorCode::kBadInput,
                      "{} has {} tokens, wanted at least {} (a sequence of {} and one more): "
                      "prepare more text or shorten the sequence",
                      shards.shards().size() == 1
                          ? shards.shards().front().prefix().string() + ".bin"
                          : shards.shards().front().prefix().parent_path().string(),
                      shards.tokens(), options.sequence + 1, options.sequence);
  }
  return Sampler(shards, options);
}

Sampler::Sampler(TokenShards shards, const SamplerOptions& options)
    : shards_(std::move(shards)),
      options_(options),
      windows_((shards_.tokens() - 1) / options.sequence) {}

std::int64_t Sampler::position(std::int64_t index) const {
  DYNMO_CHECK(index >= 0, "a sample of at least 0, got {}", index);
  const auto pass = static_cast<std::uint64_t>(index / windows_);
  const auto window =
      permute(static_cast<std::uint64_t>(index % windows_), static_cast<std::uint64_t>(windows_),
              mix_key({options_.seed, kOrderStream, pass}));
  const std::int64_t left_over = shards_.tokens() - 1 - windows_ * options_.sequence;
  Rng shift(mix_key({options_.seed, kShiftStream, pass}));
  return static_cast<std::int64_t>(shift.below(static_cast<std::uint64_t>(left_over) + 1)) +
         static_cast<std::int64_t>(window) * options_.sequence;
}

void Sampler::check_tokens(std::int64_t first, std::span<const std::int32_t> tokens) const {
  bool good = true;
  for (const std::int32_t token : tokens) good &= token >= 0 && token < options_.vocabulary;
  if (good) return;
  throw ForeignShard(fmt::format(
      "{}: a token within {} of token {} is not below the vocabulary of {}: the shard belongs "
      "to another tokenizer, or has changed",
      shards_.file_of(first), tokens.size(), first, options_.vocabulary));
}

void Sampler::sample(std::int64_t index, std::span<std::int32_t> tokens) const {
  DYNMO_CHECK(static_cast<std::int64_t>(tokens.size()) == options_.sequence + 1,
              "room for {} tokens, got {}", options_.sequence + 1, tokens.size());
  const std::int64_t first = position(index);
  shards_.read(first, tokens);
  check_tokens(first, tokens);
}

void Sampler::sample(std::int64_t index, std::span<std::int64_t> tokens) const {
  DYNMO_CHECK(static_cast<std::int64_t>(tokens.size()) == options_.sequence + 1,
              "room for {} tokens, got {}", options_.sequence + 1, tokens.size());
  // Copies in pieces, so that no sample allocates.
  std::array<std::int32_t, 1024> piece;
  std::int64_t first = position(index);
  while (!tokens.empty()) {
    const auto some = std::span(piece).first(std::min(piece.size(), tokens.size()));
    shards_.read(first, some);
    check_tokens(first, some);
    for (std::size_t i = 0; i < some.size(); ++i) tokens[i] = some[i];
    tokens = tokens.subspan(some.size());
    first += static_cast<std::int64_t>(some.size());
  }
}

}  // namespace dynmo::data
