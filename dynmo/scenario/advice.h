// SPDX-License-Identifier: Apache-2.0
#pragma once

// Advice on a job: plan/advice.h for costs of several of its steps.

#include <optional>

#include "dynmo/plan/advice.h"
#include "dynmo/scenario/job.h"

namespace dynmo::scenario {

// Looks at four steps, spread over the run, with all its replicas. It says nothing of fewer ranks
// if the scenario has events, since they change the ranks. nullopt as plan::advise() says.
[[nodiscard]] std::optional<plan::Advice> advise(const Job& job);

}  // namespace dynmo::scenario
