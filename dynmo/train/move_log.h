// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reports every move to the user. One line follows when layers move, and one with the gain after
// three steps under the new plan. One thread uses it.

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/plan/plan.h"
#include "dynmo/runtime/step_report.h"

namespace dynmo::train {

class MoveLog {
 public:
  // Returns the lines for a step that ran under `plan`, each about the run `name`.
  [[nodiscard]] std::vector<std::string> add(const std::string& name,
                                             const runtime::StepReport& report,
                                             const plan::Plan& plan);

 private:
  struct Move {
    std::int64_t step = 0;
    double before_s = 0;  // median of the steps before it; 0: none
    double predicted_gain = 0;
    bool work_changed = false;  // at the same step
  };

  // A decision to move whose plan is not yet in force.
  struct Begun {
    double predicted_gain = 0;
    std::string reason;
    bool work_changed = false;
  };

  std::deque<double> step_s_;  // newest under one plan, without the time of balancing
  std::optional<Begun> begun_;
  std::optional<Move> move_;  // its gain is not known yet
};

}  // namespace dynmo::train
