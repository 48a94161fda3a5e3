// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rows with the highest scores, chosen alike wherever they are chosen.

#include <cstdint>
#include <span>
#include <vector>

namespace dynmo::model {

// Indices of the `count` highest scores, ascending. A total order decides: the higher score, then
// the lower index; a score that is no number comes last, so that a step that diverges ends as it
// does without a selection, by its loss. Requires 0 <= count <= scores.size().
[[nodiscard]] std::vector<std::int64_t> select_top(std::span<const float> scores,
                                                   std::int64_t count);

}  // namespace dynmo::model
