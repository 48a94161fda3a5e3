// SPDX-License-Identifier: Apache-2.0
#pragma once

// Placements in which every rank holds the same number of stages. The result is the rank of each
// stage, numbered along the model.

#include <vector>

#include "dynmo/core/ids.h"

namespace dynmo::schedule {

// Puts stage s on rank s mod `ranks`, as interleaved 1F1B (Narayanan et al. 2021) does.
// stages_per_rank = 1 gives the usual one stage a rank. Requires ranks, stages_per_rank >= 1.
[[nodiscard]] std::vector<Rank> loop_placement(int ranks, int stages_per_rank);

// Places stages in the order 0, 1, ..., P-1, P-1, ..., 1, 0, 0, 1, ... of ranks. Two stages a rank
// are the V of ZB-V (Qi et al. 2024): rank r holds stages r and 2P-1-r. Requires ranks,
// stages_per_rank >= 1.
[[nodiscard]] std::vector<Rank> wave_placement(int ranks, int stages_per_rank);

}  // namespace dynmo::schedule
