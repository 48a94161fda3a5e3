// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/placement.h"

#include "dynmo/core/check.h"

namespace dynmo::schedule {
namespace {

std::vector<Rank> placement(int ranks, int stages_per_rank, bool turning) {
  DYNMO_CHECK(ranks >= 1 && stages_per_rank >= 1, "at least 1 rank and stage, got {} and {}", ranks,
              stages_per_rank);
  std::vector<Rank> of_stage;
  for (int lap = 0; lap < stages_per_rank; ++lap) {
    for (int i = 0; i < ranks; ++i) {
      of_stage.emplace_back(turning && lap % 2 == 1 ? ranks - 1 - i : i);
    }
  }
  return of_stage;
}

}  // namespace

std::vector<Rank> loop_placement(int ranks, int stages_per_rank) {
  return placement(ranks, stages_per_rank, /*turning=*/false);
}

std::vector<Rank> wave_placement(int ranks, int stages_per_rank) {
  return placement(ranks, stages_per_rank, /*turning=*/true);
}

}  // namespace dynmo::schedule
