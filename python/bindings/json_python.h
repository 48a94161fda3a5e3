// SPDX-License-Identifier: Apache-2.0
#pragma once

// Converts between Json and Python's dicts, lists and numbers. So every documented format is a
// dict. Scalars of numpy count as numbers.

#include <nanobind/nanobind.h>

#include "dynmo/core/json.h"

namespace dynmo::python {

// Converts to Json. Throws Python's TypeError for a key that is not a string, and for other kinds
// of objects. Throws ValueError for an integer beyond 64 bits and for more than 64 levels.
[[nodiscard]] Json to_json(nanobind::handle value);
[[nodiscard]] nanobind::object to_python(const Json& json);

}  // namespace dynmo::python
