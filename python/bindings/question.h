// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/plan/question/question.h"

namespace dynmo::python {

// A question from a dict: `profile` ("dynmo-profile-1"), or `config` (of Hugging Face) or `work`
// (layers as the package counted them, the fields of cost::LayerWork) with `device`, `sequence`,
// `micro_batch_size`, `head_slices`; `ranks` with `memory`, or `cluster`
// ("dynmo-cluster-1"); `current` ("dynmo-plan-1"); the rest as the flags of `dynmo plan` say.
// kBadInput naming the key.
[[nodiscard]] Expected<plan::Question> read_question(const Json& json);

// The costs that such a question has; it may name no ranks.
[[nodiscard]] Expected<cost::ModelCost> read_costs(const Json& json);

// The arithmetic and the bytes of the layers of a question's config.
[[nodiscard]] Expected<std::vector<cost::LayerWork>> read_work(const Json& json);

}  // namespace dynmo::python
