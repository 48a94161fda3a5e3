// SPDX-License-Identifier: Apache-2.0
#pragma once

// Json and Python's dicts, lists and numbers, one into the other: with this one conversion every
// documented format is a dict. Scalars of numpy count as the numbers that they are.

#include <nanobind/nanobind.h>

#include "dynmo/core/json.h"

namespace dynmo::python {

// Python's TypeError for what JSON has not: a key that is no string, an object of another kind; its
// ValueError for an integer beyond 64 bits and for more than 64 levels.
[[nodiscard]] Json to_json(nanobind::handle value);
[[nodiscard]] nanobind::object to_python(const Json& json);

}  // namespace dynmo::python
