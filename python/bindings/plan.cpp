// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dynmo/cost/device.h"
#include "dynmo/cost/files.h"
#include "dynmo/observe/plan_report.h"
#include "dynmo/observe/trace.h"
#include "dynmo/plan/question/emit.h"
#include "dynmo/plan/question/question.h"
#include "dynmo/schedule/text.h"
#include "python/bindings/errors.h"
#include "python/bindings/json_python.h"
#include "python/bindings/parts.h"
#include "python/bindings/question.h"

namespace dynmo::python {
namespace nb = nanobind;
namespace {

// An answer with its question, to which its report refers.
struct Planned {
  plan::Question question;
  plan::Answer answer;
};

// Rank, kind, stage, micro-batch, start and end in nanoseconds.
using Slice = std::tuple<int, std::string, int, int, std::int64_t, std::int64_t>;

std::unique_ptr<Planned> make_plan(const nb::dict& asked) {
  const Json json = to_json(asked);
  auto planned = std::make_unique<Planned>();
  const Expected<void> done = [&]() -> Expected<void> {
    const nb::gil_scoped_release release;
    DYNMO_ASSIGN(planned->question, read_question(json));
    DYNMO_ASSIGN(planned->answer, plan::answer(planned->question));
    return {};
  }();
  raise_if_error(done);
  return planned;
}

std::string report_of(const Planned& planned, int width, bool ascii) {
  constexpr int kMinWidth = 40;
  if (width < kMinWidth)
    raise(make_error(ErrorCode::kBadInput, "dynmo: width is {}, wanted 40 or more", width));
  return observe::plan_report(observe::report_of(planned.question, planned.answer),
                              {.width = width, .ascii = ascii});
}

std::string trace_of(const Planned& planned) {
  const sim::SimResult& result = planned.answer.evaluation.result;
  const std::vector<observe::TraceProcess> processes = {
      {.name = "planned", .steps = {{.timeline = result.timeline, .duration = result.step_time}}}};
  return observe::trace_json(processes);
}

// Name and text of each file.
using Files = std::vector<std::pair<std::string, std::string>>;
std::pair<Files, std::string> emit(const Planned& planned, const std::string& form,
                                   const std::string& folder, bool kept_names, bool write) {
  plan::EmitProblem problem = plan::emit_problem(planned.question, planned.answer);
  if (kept_names) problem.names = plan::ModuleNames::kKept;
  const plan::Emitted emitted =
      value_or_raise(plan::emit(value_or_raise(plan::parse_emit_form(form)), problem, folder));
  if (write) raise_if_error(plan::write_emitted(emitted, folder));
  Files files;
  for (const plan::EmittedFile& file : emitted.files) files.emplace_back(file.name, file.text);
  return {std::move(files), emitted.note};
}

std::vector<Slice> slices_of(const Planned& planned) {
  std::vector<Slice> slices;
  const auto& ranks = planned.answer.evaluation.result.timeline.ranks;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const schedule::TimedAction& timed : ranks[rank]) {
      slices.emplace_back(static_cast<int>(rank), std::string(schedule::name(timed.action.kind)),
                          timed.action.stage.value, timed.action.micro_batch.value,
                          timed.start.count(), timed.end.count());
    }
  }
  return slices;
}

nb::object costs_of(const nb::dict& asked) {
  return to_python(cost::profile_json(value_or_raise(read_costs(to_json(asked)))));
}

nb::object work_of(const nb::dict& asked) {
  Json layers = Json::array();
  for (const cost::LayerWork& work : value_or_raise(read_work(to_json(asked)))) {
    layers.push_back({{"name", work.name},
                      {"matrix_flops", work.matrix_flops},
                      {"core_flops", work.core_flops},
                      {"parameters", work.parameters},
                      {"copied_parameters", work.copied_parameters},
                      {"activation_bytes", work.activation_bytes}});
  }
  return to_python(layers);
}

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const cost::Device& device : cost::devices()) names.push_back(device.name);
  return names;
}

std::vector<std::string> balancer_names() {
  std::vector<std::string> names;
  for (const plan::Balancer balancer : plan::balancers()) names.emplace_back(plan::name(balancer));
  return names;
}

}  // namespace

void bind_plan(nb::module_& module) {
  nb::class_<Planned>(module, "Planned", "A plan with the question that it answers.")
      .def_prop_ro(
          "document", [](const Planned& planned) { return to_python(planned.answer.document); },
          nb::sig("def document(self) -> dict[str, typing.Any]"))
      .def_prop_ro(
          "costs",
          [](const Planned& planned) {
            return to_python(cost::profile_json(planned.answer.costs));
          },
          nb::sig("def costs(self) -> dict[str, typing.Any]"))
      .def("report", report_of, nb::arg("width") = 100, nb::arg("ascii") = false)
      .def("trace", trace_of)
      .def("emit", emit, nb::arg("form"), nb::arg("folder"), nb::arg("kept_names"),
           nb::arg("write"))
      .def("slices", slices_of);
  module.def("make_plan", make_plan, nb::arg("asked"),
             nb::sig("def make_plan(asked: dict[str, typing.Any]) -> Planned"));
  module.def("costs_of", costs_of, nb::arg("asked"),
             nb::sig("def costs_of(asked: dict[str, typing.Any]) -> dict[str, typing.Any]"));
  module.def("work_of", work_of, nb::arg("asked"),
             nb::sig("def work_of(asked: dict[str, typing.Any]) -> list[dict[str, typing.Any]]"));
  module.def("devices", device_names);
  module.def("balancers", balancer_names);
}

}  // namespace dynmo::python
