// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/plan/question/asked.h"

namespace dynmo::python {

// Reads a question from a dict with the arguments of plan::options_of(). A "PLAN.json" is its
// content. `work` replaces `config`: layers counted by the package, with the fields of
// cost::LayerWork. Returns kBadInput with the key.
[[nodiscard]] Expected<plan::Question> read_question(const Json& json);

// Returns the costs of such a question, which may omit ranks.
[[nodiscard]] Expected<cost::ModelCost> read_costs(const Json& json);

// Returns the arithmetic and the bytes of the layers of a question's config.
[[nodiscard]] Expected<std::vector<cost::LayerWork>> read_work(const Json& json);

}  // namespace dynmo::python
