// SPDX-License-Identifier: Apache-2.0
#pragma once

// The assignment problem: a column of its own for each row, with the greatest sum of scores.

#include <cstddef>
#include <vector>

namespace dynmo::plan {

__extension__ typedef __int128 Score;
using Scores = std::vector<std::vector<Score>>;  // square

// The column of each row. Exact, O(n^3), up to 512 rows; beyond, greedily the greatest score first.
[[nodiscard]] std::vector<std::size_t> assignment(const Scores& scores);

}  // namespace dynmo::plan
