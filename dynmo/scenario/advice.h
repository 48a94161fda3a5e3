// SPDX-License-Identifier: Apache-2.0
#pragma once

// Advice on a job: plan/question/advice.h for the costs of several of its steps.

#include <optional>

#include "dynmo/plan/question/advice.h"
#include "dynmo/scenario/job.h"

namespace dynmo::scenario {

// Advises on four steps, spread over the run, with all its replicas. If the scenario has events, it
// omits fewer ranks, because events change the ranks. Returns nullopt as plan::advise() does.
[[nodiscard]] std::optional<plan::Advice> advise(const Job& job);

}  // namespace dynmo::scenario
