// SPDX-License-Identifier: Apache-2.0
#pragma once

// The assignment problem: assigns each row a different column, with the greatest sum of scores.

#include <cstddef>
#include <vector>

namespace dynmo::plan {

__extension__ typedef __int128 Score;
using Scores = std::vector<std::vector<Score>>;  // square

// Returns the column of each row. Exact, O(n^3), up to 512 rows. Beyond, it is greedy: the greatest
// score first.
[[nodiscard]] std::vector<std::size_t> assignment(const Scores& scores);

}  // namespace dynmo::plan
