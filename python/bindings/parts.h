// SPDX-License-Identifier: Apache-2.0
#pragma once

// The parts of the module `dynmo._core`, one source each.

#include <nanobind/nanobind.h>

namespace dynmo::python {

void bind_decisions(nanobind::module_& module);
void bind_digest(nanobind::module_& module);
void bind_plan(nanobind::module_& module);
void bind_run_log(nanobind::module_& module);
void bind_schedule(nanobind::module_& module);
void bind_scenario(nanobind::module_& module);

}  // namespace dynmo::python
