// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random numbers that change slowly. The number of any step is computed directly.

#include <cstdint>

namespace dynmo::dynamism {

// Returns a normal deviate (mean 0, std 1 at every position) that moves smoothly. It is nearly the
// same at near positions, and independent at positions 2 or more apart. Positions start at 0.
[[nodiscard]] double drift(std::uint64_t key, double position);

// Returns the position of a settling process after `step` steps. It finally moves one unit every
// `period` steps, and several more units in the first `settle` steps.
[[nodiscard]] double settling_position(std::int64_t step, std::int64_t settle, std::int64_t period);

// Returns a normal deviate of one step, clipped at 4 stds.
[[nodiscard]] double step_noise(std::uint64_t key);

}  // namespace dynmo::dynamism
