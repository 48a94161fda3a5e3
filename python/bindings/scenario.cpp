// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/observe/trace.h"
#include "dynmo/scenario/report.h"
#include "dynmo/scenario/run.h"
#include "python/bindings/errors.h"
#include "python/bindings/json_python.h"
#include "python/bindings/parts.h"

namespace dynmo::python {
namespace nb = nanobind;
namespace {

struct Simulated {
  scenario::Scenario scenario;
  scenario::Comparison comparison;
};

// Raises KeyboardInterrupt after Ctrl-C. Called at every step, because Python does not interrupt
// C++.
void check_signals() {
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

Expected<void> run(Simulated& simulated, int trace_steps) {
  const scenario::Scenario& asked = simulated.scenario;
  DYNMO_ASSIGN(const scenario::Job job, scenario::make_job(asked));
  DYNMO_ASSIGN(simulated.comparison,
               scenario::compare(
                   job, asked.policy.compare,
                   {.trace_steps = trace_steps, .progress = [](const auto&) { check_signals(); }}));
  return {};
}

std::unique_ptr<Simulated> simulate_file(const std::string& path,
                                         const std::vector<std::string>& settings,
                                         const std::vector<std::string>& policies,
                                         int trace_steps) {
  auto simulated = std::make_unique<Simulated>();
  const Expected<void> done = [&]() -> Expected<void> {
    const nb::gil_scoped_release release;
    DYNMO_ASSIGN(simulated->scenario, scenario::read_scenario(path, settings, policies));
    return run(*simulated, trace_steps);
  }();
  raise_if_error(done);
  return simulated;
}

std::unique_ptr<Simulated> simulate_text(const std::string& text,
                                         const std::vector<std::string>& policies,
                                         int trace_steps) {
  auto simulated = std::make_unique<Simulated>();
  const Expected<void> done = [&]() -> Expected<void> {
    const nb::gil_scoped_release release;
    DYNMO_ASSIGN(simulated->scenario, scenario::parse_scenario(text, "scenario", policies));
    return run(*simulated, trace_steps);
  }();
  raise_if_error(done);
  return simulated;
}

}  // namespace

void bind_scenario(nb::module_& module) {
  nb::class_<Simulated>(module, "Simulated", "A scenario and its runs under several policies.")
      .def_prop_ro(
          "document",
          [](const Simulated& simulated) {
            return to_python(scenario::comparison_json(simulated.scenario, simulated.comparison));
          },
          nb::sig("def document(self) -> dict[str, typing.Any]"))
      .def_prop_ro("scenario",
                   [](const Simulated& simulated) { return scenario::to_toml(simulated.scenario); })
      .def("report",
           [](const Simulated& simulated) {
             return scenario::report(simulated.scenario, simulated.comparison);
           })
      .def(
          "decisions",
          [](const Simulated& simulated) { return scenario::decisions_text(simulated.comparison); })
      .def("trace", [](const Simulated& simulated) {
        return observe::trace_json(scenario::trace_of(simulated.comparison));
      });
  module.def("simulate_file", simulate_file, nb::arg("path"), nb::arg("settings"),
             nb::arg("policies"), nb::arg("trace_steps"));
  module.def("simulate_text", simulate_text, nb::arg("text"), nb::arg("policies"),
             nb::arg("trace_steps"));
}

}  // namespace dynmo::python
