// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/plan/question/question.h"

namespace dynmo::python {

// Reads a question from a dict. Costs come from `profile` ("dynmo-profile-1"), `config` (of Hugging
// Face) or `work`. The last one has layers counted by the package, with the fields of
// cost::LayerWork. The latter two have `device`, `sequence`, `micro_batch_size`, `head_slices`,
// `tensor_parallel` and `optimizer_shards`. Ranks come from `ranks` with `memory`, or from
// `cluster` ("dynmo-cluster-1"). `current` is a "dynmo-plan-1". The other keys are the flags of
// `dynmo plan`. Returns kBadInput with the key.
[[nodiscard]] Expected<plan::Question> read_question(const Json& json);

// Returns the costs of such a question, which may omit ranks.
[[nodiscard]] Expected<cost::ModelCost> read_costs(const Json& json);

// Returns the arithmetic and the bytes of the layers of a question's config.
[[nodiscard]] Expected<std::vector<cost::LayerWork>> read_work(const Json& json);

}  // namespace dynmo::python
