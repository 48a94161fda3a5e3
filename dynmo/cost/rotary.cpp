// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/rotary.h"

#include <array>
#include <cmath>
#include <numbers>
#include <utility>

namespace dynmo::cost {
Expected<void> validate(const Rotary& rotary) {
  const std::array<std::pair<const char*, double>, 5> values = {
      {{"theta", rotary.theta},
       {"factor", rotary.factor},
       {"low_freq_factor", rotary.low_freq_factor},
       {"high_freq_factor", rotary.high_freq_factor},
       {"original_positions", static_cast<double>(rotary.original_positions)}}};
  for (const auto& [key, value] : values) {
    if (std::isfinite(value) && value > 0) continue;
    return make_error(ErrorCode::kBadInput, "model.rope_{} is {:g}, wanted above 0", key, value);
  }
  if (rotary.scaling == RotaryScaling::kLlama3 &&
      rotary.high_freq_factor <= rotary.low_freq_factor) {
    return make_error(
        ErrorCode::kBadInput,
        "model.rope_high_freq_factor is {:g}, wanted above model.rope_low_freq_factor ({:g})",
        rotary.high_freq_factor, rotary.low_freq_factor);
  }
  return {};
}

std::vector<double> frequencies(const Rotary& rotary, std::int64_t head_size) {
  std::vector<double> result;
  for (std::int64_t k = 0; k < head_size / 2; ++k) {
    double frequency =
        std::pow(rotary.theta, -2.0 * static_cast<double>(k) / static_cast<double>(head_size));
    if (rotary.scaling == RotaryScaling::kLinear) frequency /= rotary.factor;
    if (rotary.scaling == RotaryScaling::kLlama3) {
      const double rotations =
          static_cast<double>(rotary.original_positions) * frequency / (2 * std::numbers::pi);
      if (rotations < rotary.low_freq_factor) {
        frequency /= rotary.factor;
      } else if (rotations <= rotary.high_freq_factor) {
        const double kept = (rotations - rotary.low_freq_factor) /
                            (rotary.high_freq_factor - rotary.low_freq_factor);
        frequency = (1 - kept) * frequency / rotary.factor + kept * frequency;
      }
    }
    result.push_back(frequency);
  }
  return result;
}

}  // namespace dynmo::cost
