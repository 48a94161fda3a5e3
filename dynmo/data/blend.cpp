// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/blend.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"

namespace dynmo::data {
namespace {

constexpr std::uint64_t kBlendStream = 3;
constexpr int kShareDigits = 9;  // behind the point
// With one digit more, 64 shares still fit an int64.
constexpr std::int64_t kMostBeforeDigit = 10'000'000;

// Parses a share, in units of 1e-9, or returns nullopt.
std::optional<std::int64_t> parse_share(std::string_view text) {
  std::int64_t value = 0;
  int behind = -1;  // the point
  bool digits = false;
  for (const char c : text) {
    if (c == '.' && behind < 0) {
      behind = 0;
      continue;
    }
    const bool too_large = behind < 0 && value >= kMostBeforeDigit;
    if (c < '0' || c > '9' || behind >= kShareDigits || too_large) return {};
    value = 10 * value + (c - '0');
    digits = true;
    if (behind >= 0) ++behind;
  }
  if (!digits) return {};
  for (int i = std::max(behind, 0); i < kShareDigits; ++i) value *= 10;
  return value;
}

}  // namespace

Expected<std::vector<BlendPart>> parse_blend(std::span<const std::string> texts) {
  if (texts.empty() || texts.size() > kMaxBlendParts) {
    return make_error(ErrorCode::kBadInput, "data.blend has {} parts, wanted 1 to {}", texts.size(),
                      kMaxBlendParts);
  }
  std::vector<BlendPart> parts;
  std::int64_t divisor = 0;
  for (const std::string& text : texts) {
    const std::size_t blank = text.find(' ');
    const auto share = parse_share(text.substr(0, blank));
    const std::size_t path =
        blank == std::string::npos ? blank : text.find_first_not_of(' ', blank);
    if (!share || *share == 0 || path == std::string::npos) {
      return make_error(
          ErrorCode::kBadInput,
          "data.blend has the part '{}', wanted a share above 0 and below 1e8, and a folder, such "
          "as '0.3 FOLDER'",
          text);
    }
    divisor = std::gcd(divisor, *share);
    parts.push_back({.weight = *share, .path = text.substr(path)});
  }
  std::int64_t sum = 0;
  for (BlendPart& part : parts) sum += part.weight /= divisor;
  if (sum > kMaxBlendPeriod) {
    return make_error(
        ErrorCode::kBadInput,
        "data.blend repeats after {} samples, the least in which the shares are whole "
        "numbers: wanted shares of fewer digits, {} samples at most",
        sum, kMaxBlendPeriod);
  }
  return parts;
}

Blend::Blend(std::vector<std::int64_t> weights) : weights_(std::move(weights)) {
  const std::int64_t period = std::accumulate(weights_.begin(), weights_.end(), std::int64_t{0});
  DYNMO_CHECK(!weights_.empty() && weights_.size() <= kMaxBlendParts &&
                  std::ranges::all_of(weights_, [](std::int64_t w) { return w > 0; }) &&
                  period <= kMaxBlendPeriod,
              "1 to {} weights above 0 of a sum of at most {}, got {} of {}", kMaxBlendParts,
              kMaxBlendPeriod, weights_.size(), period);
  // A set is eligible if it is behind its share by 1 / scale samples. The eligible set that would
  // first be too far behind is next. Values are whole multiples of 1 / (scale x period).
  const std::int64_t scale = std::max<std::int64_t>(2 * std::ssize(weights_) - 2, 1);
  std::vector<std::int64_t> count(weights_.size(), 0);
  for (std::int64_t n = 1; n <= period; ++n) {
    std::optional<std::size_t> next;
    std::int64_t spare = 0;  // of the next one, until it is too far behind
    for (std::size_t k = 0; k < weights_.size(); ++k) {
      const std::int64_t behind = scale * (weights_[k] * n - period * count[k]);
      if (behind < period) continue;
      const std::int64_t own = (scale - 1) * period - behind;
      if (next && own * weights_[*next] >= spare * weights_[k]) continue;
      next = k;
      spare = own;
    }
    DYNMO_CHECK(next.has_value(), "a set that is behind its share, at sample {}", n);
    sets_.push_back(static_cast<std::uint8_t>(*next));
    before_.push_back(static_cast<std::int32_t>(count[*next]++));
  }
}

Blend::Place Blend::place(std::int64_t index) const {
  DYNMO_CHECK(index >= 0, "a sample of at least 0, got {}", index);
  const std::int64_t period = std::ssize(sets_);
  const auto at = static_cast<std::size_t>(index % period);
  const std::size_t set = sets_[at];
  return {.set = set, .index = index / period * weights_[set] + before_[at]};
}

BlendedSampler::BlendedSampler(std::vector<Sampler> samplers, Blend blend)
    : samplers_(std::move(samplers)), blend_(std::move(blend)) {
  DYNMO_CHECK(samplers_.size() == blend_.weights().size(), "{} samplers, got {}",
              blend_.weights().size(), samplers_.size());
}

void BlendedSampler::sample(std::int64_t index, std::span<std::int64_t> tokens) const {
  const Blend::Place place = blend_.place(index);
  samplers_[place.set].sample(place.index, tokens);
}

Digest BlendedSampler::fingerprint() const {
  if (samplers_.size() == 1) return samplers_.front().shards().fingerprint();
  std::string text;
  for (std::size_t k = 0; k < samplers_.size(); ++k) {
    text += fmt::format("{} {} ", blend_.weights()[k], samplers_[k].shards().fingerprint().hex());
  }
  return digest_of(text);
}

std::uint64_t seed_of_set(std::uint64_t seed, std::size_t set) {
  return set == 0 ? seed : mix_key({seed, kBlendStream, set});
}

}  // namespace dynmo::data
