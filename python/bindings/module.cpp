// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>

#include "python/bindings/parts.h"

NB_MODULE(_core, module) {
  module.doc() = "dynmo::core for Python; the package `dynmo` is the way to it.";
  module.attr("version") = DYNMO_VERSION;
  dynmo::python::bind_decisions(module);
  dynmo::python::bind_digest(module);
  dynmo::python::bind_plan(module);
  dynmo::python::bind_run_log(module);
  dynmo::python::bind_schedule(module);
  dynmo::python::bind_scenario(module);
}
