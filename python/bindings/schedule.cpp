// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "dynmo/cost/files.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/csv.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/schedule/text.h"
#include "dynmo/sim/simulate.h"
#include "python/bindings/errors.h"
#include "python/bindings/json_python.h"
#include "python/bindings/parts.h"

namespace dynmo::python {
namespace nb = nanobind;
namespace {

using schedule::Schedule;

Schedule make(const std::string& kind, const std::vector<int>& stages, int micro_batches,
              std::optional<int> ranks, int frozen_stages, int group_size) {
  schedule::PipelineShape shape{.ranks = 0, .micro_batches = micro_batches, .stages = {}};
  for (const int rank : stages) {
    const bool frozen = static_cast<int>(shape.stages.size()) < frozen_stages;
    shape.stages.push_back({.rank = Rank{rank}, .frozen = frozen});
    shape.ranks = std::max(shape.ranks, rank + 1);
  }
  shape.ranks = ranks.value_or(shape.ranks);
  return value_or_raise([&]() -> Expected<Schedule> {
    DYNMO_ASSIGN(const schedule::ScheduleKind parsed, schedule::parse_schedule_kind(kind));
    return schedule::make_schedule(parsed, shape, {.group_size = group_size});
  }());
}

Schedule lowered(const Schedule& schedule) {
  return schedule.lowered ? schedule : schedule::lower(schedule);
}

nb::object check(const Schedule& schedule) {
  const schedule::ScheduleFacts facts = value_or_raise(schedule::check(lowered(schedule)));
  return to_python(
      {{"in_flight", facts.in_flight}, {"actions", facts.actions}, {"messages", facts.messages}});
}

std::vector<std::vector<std::string>> rows(const Schedule& schedule) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& actions : schedule.ranks) {
    auto& row = rows.emplace_back();
    for (const schedule::Action& action : actions) row.push_back(schedule::to_string(action));
  }
  return rows;
}

// Reads the costs of a stage. Absent ones are 0.
Expected<sim::StageCost> read_stage(JsonObject& object) {
  const auto seconds = [&](const char* key) {
    const double value = object.number(key, 0.0);
    if (!(value >= 0 && value <= cost::kMaxSeconds)) {
      object.fail(key, fmt::format("is {}, wanted seconds from 0 to {}", value, cost::kMaxSeconds));
      return Nanoseconds{0};
    }
    return to_nanoseconds(value);
  };
  const auto bytes = [&](const char* key) { return object.bytes(key, Bytes{0}); };
  const sim::StageCost stage{.forward = seconds("forward_s"),
                             .input_gradient = seconds("backward_input_s"),
                             .weight_gradient = seconds("backward_weight_s"),
                             .update = seconds("update_s"),
                             .state = bytes("state_bytes"),
                             .activation = bytes("activation_bytes"),
                             .boundary = bytes("boundary_bytes")};
  DYNMO_TRY(object.finish());
  return stage;
}

Expected<std::vector<sim::StageCost>> read_stages(const Json& json) {
  const Json document = {{"stages", json}};
  JsonObject root(document, "dynmo");
  std::vector<sim::StageCost> stages;
  for (JsonObject& object : root.objects("stages")) {
    DYNMO_ASSIGN(stages.emplace_back(), read_stage(object));
  }
  DYNMO_TRY(root.finish());
  return stages;
}

Json result_json(const sim::SimResult& result) {
  const auto seconds = [](Nanoseconds time) { return to_seconds(time); };
  Json ranks = Json::array();
  for (const sim::RankUsage& rank : result.ranks) {
    ranks.push_back({{"busy_s", seconds(rank.busy)},
                     {"idle_s", seconds(rank.idle)},
                     {"fill_drain_s", seconds(rank.split.fill_drain)},
                     {"imbalance_s", seconds(rank.split.imbalance)},
                     {"communication_s", seconds(rank.split.communication)},
                     {"straggler_s", seconds(rank.split.straggler)},
                     {"peak_activation_bytes", rank.peak_activation.value},
                     {"peak_memory_bytes", rank.peak_memory.value}});
  }
  return {{"step_time_s", seconds(result.step_time)},
          {"bubble", result.bubble},
          {"ranks", std::move(ranks)}};
}

nb::object replay(const Schedule& schedule, const nb::object& stages, const nb::object& cluster) {
  const Json costs = to_json(stages);
  const Json machines = to_json(cluster);
  const auto result = [&]() -> Expected<sim::SimResult> {
    const nb::gil_scoped_release release;
    DYNMO_ASSIGN(const std::vector<sim::StageCost> read, read_stages(costs));
    cost::Cluster ranks = cost::equal_ranks(schedule.shape.ranks);
    if (!machines.is_null()) {
      DYNMO_ASSIGN(ranks, cost::parse_cluster(machines, "cluster"));
    }
    return sim::simulate(lowered(schedule), read, ranks);
  }();
  return to_python(result_json(value_or_raise(result)));
}

std::vector<std::string> kind_names() {
  std::vector<std::string> names;
  for (const schedule::KindTraits& kind : schedule::schedule_kinds()) names.emplace_back(kind.name);
  return names;
}

}  // namespace

void bind_schedule(nb::module_& module) {
  nb::class_<Schedule>(module, "Schedule",
                       "The actions of one step: an ordered list a rank, spelled as PyTorch does.")
      .def(nb::new_(&make), nb::arg("kind"), nb::arg("stages"), nb::arg("micro_batches"),
           nb::kw_only(), nb::arg("ranks") = nb::none(), nb::arg("frozen_stages") = 0,
           nb::arg("group_size") = 0, "`stages` has the rank of each stage.")
      .def_static(
          "from_csv",
          [](const std::string& text) {
            return value_or_raise(schedule::read_csv(text, "dynmo")).schedule;
          },
          nb::arg("text"), "Reads the CSV of torch.distributed.pipelining.")
      .def_prop_ro("rows", rows)
      .def_prop_ro("ranks", [](const Schedule& schedule) { return schedule.shape.ranks; })
      .def_prop_ro("micro_batches",
                   [](const Schedule& schedule) { return schedule.shape.micro_batches; })
      .def_prop_ro("is_lowered", [](const Schedule& schedule) { return schedule.lowered; })
      .def("lower", lowered, "The schedule with its sends and receives.")
      .def("check", check, nb::sig("def check(self) -> dict[str, typing.Any]"),
           "Proves that the step completes; raises BadInputError with the actions that wait.")
      .def("csv", [](const Schedule& schedule) { return schedule::write_csv(schedule); })
      .def("replay", replay, nb::arg("stages"), nb::arg("cluster") = nb::none(),
           nb::sig("def replay(self, stages: list[dict[str, typing.Any]], cluster: "
                   "dict[str, typing.Any] | None = None) -> dict[str, typing.Any]"),
           "The step with these costs of each stage.")
      .def("__str__", [](const Schedule& schedule) { return schedule::to_grid(schedule); })
      .def(
          "__eq__", [](const Schedule& left, const Schedule& right) { return left == right; },
          nb::is_operator(), nb::sig("def __eq__(self, other: object, /) -> bool"));
  module.def("schedule_kinds", kind_names);
}

}  // namespace dynmo::python
