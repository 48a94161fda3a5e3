// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/run_events.h"

namespace dynmo::observe {

Json decision_event(const control::Decision& decision) {
  return {{"taken", decision.migrate},
          {"cause", decision.why},
          {"reason", decision.reason},
          {"current_step_s", decision.current_step_s},
          {"planned_step_s", decision.planned_step_s},
          {"gain_s", decision.gain_s},
          {"cost_s", decision.cost_s},
          {"noise_s", decision.noise_s},
          {"ranks_before", decision.ranks_before},
          {"ranks_after", decision.ranks_after},
          {"plan", plan::to_json(decision.plan)}};
}

Json move_event(int layers, Bytes bytes, double seconds, const plan::Plan& plan) {
  return {{"layers", layers},
          {"bytes", bytes.value},
          {"seconds", seconds},
          {"plan", plan::to_json(plan)}};
}

}  // namespace dynmo::observe
