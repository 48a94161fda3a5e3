// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numbers>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/drift_impl.h"

namespace dynmo::dynamism {
namespace {

double normal_at(std::uint64_t key, std::uint64_t knot) {
  return Rng(mix_key({key, knot})).normal();
}

}  // namespace

// Blends deviates at whole positions with cosine and sine. The squares of their weights sum to 1,
// so that the std is 1 in between, too.
double drift(std::uint64_t key, double position) {
  const double knot = std::floor(position);
  const double angle = (position - knot) * std::numbers::pi / 2;
  const auto index = static_cast<std::uint64_t>(knot);
  return std::cos(angle) * normal_at(key, index) + std::sin(angle) * normal_at(key, index + 1);
}

double settling_position(std::int64_t step, std::int64_t settle, std::int64_t period) {
  const auto now = static_cast<double>(step);
  return std::log2(1 + now / static_cast<double>(settle)) + now / static_cast<double>(period);
}

double step_noise(std::uint64_t key) { return std::clamp(Rng(key).normal(), -4.0, 4.0); }

}  // namespace dynmo::dynamism
