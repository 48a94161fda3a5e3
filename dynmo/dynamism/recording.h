// SPDX-License-Identifier: Apache-2.0
#pragma once

// A recording has all measurements of a training run and its start, read from its load trace:
// enough to make its decisions again (scenario/run.h).

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
  plan::Plan plan;                          // of the first step
  plan::Plan measured_under;                // the plan of ...
  std::vector<cost::Observation> measured;  // ... the steps before the first, which trained nothing
  int replicas = 1;
  int accumulation = 1;  // replays of the schedule in a step
};

struct Recording {
  RunStart start;
  std::map<std::int64_t, cost::Observation> steps = {};  // what was measured in each
  // Those that ran under the plan before: the move that was decided at them ended after them.
  std::set<std::int64_t> moving = {};
};

// Numbers read back exactly.
[[nodiscard]] Json to_json(const RunStart& start);
[[nodiscard]] Json to_json(const cost::Observation& observation);
// Any JSON; plans and observations of `layers` layers. kBadInput names `origin` and JSON pointer.
[[nodiscard]] Expected<RunStart> parse_run_start(const Json& json, const std::string& origin,
                                                 int layers);
[[nodiscard]] Expected<cost::Observation> parse_observation(const Json& json,
                                                            const std::string& origin, int layers);

}  // namespace dynmo::dynamism
