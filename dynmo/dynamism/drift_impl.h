// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random numbers that change slowly, at any step without walking there.

#include <cstdint>

namespace dynmo::dynamism {

// A normal deviate (mean 0, std 1 at every position) that moves smoothly: nearly the same at
// near positions, independent at positions 2 or more apart. Positions from 0.
[[nodiscard]] double drift(std::uint64_t key, double position);

// Where a process that settles is after `step` steps: it passes one unit every `period` steps in
// the end, and in the first `settle` steps several more.
[[nodiscard]] double settling_position(std::int64_t step, std::int64_t settle, std::int64_t period);

// A normal deviate of one step, clipped at 4 stds.
[[nodiscard]] double step_noise(std::uint64_t key);

}  // namespace dynmo::dynamism
