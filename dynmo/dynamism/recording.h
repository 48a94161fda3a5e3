// SPDX-License-Identifier: Apache-2.0
#pragma once

// A recording has the start of a training run and all its measurements, read from its load trace.
// From it the run's decisions can be repeated (scenario/run.h).

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/layer_sample.h"
#include "dynmo/plan/plan.h"

namespace dynmo::dynamism {

struct RunStart {
  plan::Plan plan;            // of the first step
  plan::Plan measured_under;  // the plan of `measured`
  // The steps before the first one, which trained nothing.
  std::vector<cost::Observation> measured;
  int replicas = 1;
  int accumulation = 1;  // replays of the schedule in a step
};

struct Recording {
  RunStart start;
  std::map<std::int64_t, cost::Observation> steps = {};  // measured in each step
  // Steps that ran under the plan before a decided move, because layers were still moving.
  std::set<std::int64_t> moving = {};
};

// Writes numbers so that they read back exactly.
[[nodiscard]] Json to_json(const RunStart& start);
[[nodiscard]] Json to_json(const cost::Observation& observation);
// Parses any JSON, with plans and observations of `layers` layers. Returns kBadInput with `origin`
// and JSON pointer.
[[nodiscard]] Expected<RunStart> parse_run_start(const Json& json, const std::string& origin,
                                                 int layers);
[[nodiscard]] Expected<cost::Observation> parse_observation(const Json& json,
                                                            const std::string& origin, int layers);

}  // namespace dynmo::dynamism
