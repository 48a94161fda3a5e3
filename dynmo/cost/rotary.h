// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rotary position embedding (Su et al., "RoFormer", 2021): position t rotates pair k of a head by
// the angle t x frequency k. Models for longer inputs than they were first trained on scale the
// frequencies.

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo::cost {

enum class RotaryScaling {
  kNone,
  kLinear,  // all frequencies / factor (Chen et al., "Position Interpolation", 2023)
  kLlama3   // low frequencies / factor, high ones as they are, as in Llama 3.1
};
inline constexpr std::array<std::string_view, 3> kRotaryScalingNames = {"none", "linear", "llama3"};

struct Rotary {
  double theta = 10000;
  RotaryScaling scaling = RotaryScaling::kNone;
  double factor = 8;
  // kLlama3: a frequency is low if `original_positions` are fewer than `low_freq_factor` rotations,
  // and high if more than `high_freq_factor`. Those between are interpolated.
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  std::int64_t original_positions = 8192;

  friend bool operator==(const Rotary&, const Rotary&) = default;
};

// Checks the values. Returns kBadInput with the key of a run's config.
[[nodiscard]] Expected<void> validate(const Rotary& rotary);

// Returns by how much each pair of a head rotates from one position to the next, in radians. With
// kLlama3 the values equal transformers 5's.
[[nodiscard]] std::vector<double> frequencies(const Rotary& rotary, std::int64_t head_size);

}  // namespace dynmo::cost
