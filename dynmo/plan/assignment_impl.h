// SPDX-License-Identifier: Apache-2.0
#pragma once

// The assignment problem: assigns each row a different column, with the greatest sum of scores.

#include <cstddef>
#include <vector>

namespace dynmo::plan {

__extension__ typedef __int128 Score;
using Scores = std::vector<std::vector<Score>>;  // square

// Assigns a column of its own to each row so that the sum of the scores is greatest. Returns the
// column of each row. Exact, O(n^3), up to 512 rows. Beyond, it is greedy: the pair with the
// greatest score is assigned first.
[[nodiscard]] std::vector<std::size_t> assignment(const Scores& scores);

}  // namespace dynmo::plan
