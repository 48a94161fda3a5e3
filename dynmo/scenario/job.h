// SPDX-License-Identifier: Apache-2.0
#pragma once

// A job is made from a scenario file: the costs of every step and the machines.

#include <memory>
#include <optional>

#include "dynmo/core/expected.h"
#include "dynmo/cost/device.h"
#include "dynmo/dynamism/load_model.h"
#include "dynmo/plan/question/advice.h"
#include "dynmo/scenario/scenario.h"

namespace dynmo::scenario {

struct Job {
  Scenario scenario;
  cost::Device device;
  std::unique_ptr<dynamism::LoadModel> load;
  // The same model without dynamism, equal in every step, as the baseline of the speed-up over
  // dense training. For a trace it is the first step. For a MoE its experts are evenly loaded.
  std::unique_ptr<dynamism::LoadModel> dense;
  std::int64_t tokens_per_micro_batch = 0;  // 0: not known (of costs without model.sequence)
};

// Reads the files that the scenario names. Returns kBadInput for faulty files, an unknown device,
// and invalid parameters or shapes.
[[nodiscard]] Expected<Job> make_job(const Scenario& scenario);

// Advises for four steps, spread over the run, with all its replicas. If the scenario has events,
// omits advice on fewer ranks, because events change the ranks. Returns nullopt as plan::advise()
// does.
[[nodiscard]] std::optional<plan::Advice> advise(const Job& job);

}  // namespace dynmo::scenario
