// SPDX-License-Identifier: Apache-2.0
#pragma once

// The fields of decisions and moves in the event log (event_log.h), for `dynmo train` and
// `dynmo.torch`.

#include "dynmo/control/policy.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"
#include "dynmo/plan/plan.h"

namespace dynmo::observe {

// Returns the fields of events of kind "decision" and "move" (docs/formats.md).
[[nodiscard]] Json decision_event(const control::Decision& decision);
[[nodiscard]] Json move_event(int layers, Bytes bytes, double seconds, const plan::Plan& plan);

}  // namespace dynmo::observe
