// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measured numbers in JSON. The loss of a diverged run is not finite, which JSON has no number for.
// It is written as null and read back as NaN, so that such a run can still be examined.

#include <cmath>
#include <limits>
#include <string>

#include "dynmo/core/json.h"

namespace dynmo::observe::internal {

inline Json measured(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

// Reads a measured number. `json` is the object that `object` reads.
inline double read_measured(JsonObject& object, const Json& json, const std::string& key,
                            std::optional<double> fallback = {}) {
  if (json.is_object()) {
    const auto found = json.find(key);
    if (found != json.end() && found->is_null()) {
      object.ignore(key);
      return std::numeric_limits<double>::quiet_NaN();
    }
  }
  return object.number(key, fallback);
}

}  // namespace dynmo::observe::internal
