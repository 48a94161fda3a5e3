// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rank holds which stage, by stage, where every rank holds the same number of stages. Stages
// are numbered along the model.

#include <vector>

#include "dynmo/core/ids.h"

namespace dynmo::schedule {

// Stage s on rank s mod `ranks`: interleaved 1F1B (Narayanan et al. 2021). One stage a rank is the
// case of stages_per_rank = 1. Requires ranks, stages_per_rank >= 1.
[[nodiscard]] std::vector<Rank> loop_placement(int ranks, int stages_per_rank);

// There and back again: 0, 1, ..., P-1, P-1, ..., 1, 0, 0, 1, ... Two stages a rank are the V of
// ZB-V (Qi et al. 2024): rank r holds stages r and 2P-1-r. Requires ranks, stages_per_rank >= 1.
[[nodiscard]] std::vector<Rank> wave_placement(int ranks, int stages_per_rank);

}  // namespace dynmo::schedule
