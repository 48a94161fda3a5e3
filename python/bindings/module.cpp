// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <string_view>

#include "python/bindings/parts.h"

namespace dynmo {
extern const std::string_view kVersion;  // with the commit (cmake/write_version.cmake)
}

NB_MODULE(_core, module) {
  module.doc() = "dynmo::core for Python; the package `dynmo` is the way to it.";
  module.attr("version") = DYNMO_VERSION;
  module.attr("torch_range") = DYNMO_TORCH_RANGE;    // "2.11 to 2.15"
  module.attr("torch_tested") = DYNMO_TORCH_TESTED;  // "2.11 2.15"
  module.attr("program") = "dynmo " + std::string(dynmo::kVersion);
  dynmo::python::bind_decisions(module);
  dynmo::python::bind_digest(module);
  dynmo::python::bind_plan(module);
  dynmo::python::bind_run_log(module);
  dynmo::python::bind_schedule(module);
  dynmo::python::bind_scenario(module);
}
