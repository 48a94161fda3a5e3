// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/decisions.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/control/step_stats.h"
#include "dynmo/core/fields.h"
#include "dynmo/cost/files.h"
#include "dynmo/observe/event_log.h"
#include "python/bindings/errors.h"
#include "python/bindings/json_python.h"
#include "python/bindings/parts.h"

namespace dynmo::python {
namespace nb = nanobind;
namespace {

using Document = nb::typed<nb::dict, nb::str, nb::any>;

constexpr std::array<std::pair<std::string_view, cost::Announced>, 4> kAnnounced = {
    {{"nothing", cost::Announced::kNothing},
     {"work", cost::Announced::kWork},
     {"predicted", cost::Announced::kPredicted},
     {"known", cost::Announced::kKnown}}};

constexpr Limits kSeconds{
    .min = 0, .max = cost::kMaxSeconds, .wanted = "seconds from 0 to 1000000"};
constexpr Limits kPositive{.min = 1, .max = 1 << 20, .wanted = "a whole number from 1 to 1048576"};

double number_of(Bytes bytes) { return static_cast<double>(bytes.value); }
// Converts a number of bytes, which an exchange has as a double.
Expected<Bytes> bytes_of(double number) {
  if (!(number >= 0 && number <= number_of(cost::kMaxBytes))) {
    return make_error(ErrorCode::kBadInput, "is {}, wanted bytes from 0 to 2^50", number);
  }
  return Bytes{static_cast<std::int64_t>(number)};
}

struct Step {
  std::vector<cost::LayerSample> layers;
  std::vector<control::RankFigures> ranks;
  double step_s = 0;
};

void list_fields(IsA<Step> auto& step, auto& visit) {
  visit.each("layers", step.layers, [](auto& layer, auto& each) {
    each.optional("forward_s", layer.time.forward_s, kSeconds);
    each.optional("input_gradient_s", layer.time.input_gradient_s, kSeconds);
    each.optional("weight_gradient_s", layer.time.weight_gradient_s, kSeconds);
    each.optional("update_s", layer.update_s, kSeconds);
    each.optional_mapped("stash_bytes", layer.stash_bytes, number_of, bytes_of);
    each.optional_mapped("boundary_bytes", layer.boundary_bytes, number_of, bytes_of);
  });
  visit.each("ranks", step.ranks, [](auto& rank, auto& each) {
    each.optional("busy_s", rank.busy_s, kSeconds);
    each.optional("overhead_s", rank.overhead_s, kSeconds);
    each.optional("plan_s", rank.plan_s, kSeconds);
    each.optional("migrate_s", rank.migrate_s, kSeconds);
    each.optional("action_overhead_s", rank.action_overhead_s, kSeconds);
    each.optional("actions", rank.actions, kCount);
    each.optional("message_s", rank.message_s, kSeconds);
    each.optional("reduction_bytes_per_s", rank.reduction_bytes_per_s, kCount);
  });
  visit.optional("step_s", step.step_s, kSeconds);
}

void check_fields(const IsA<Step> auto& step, JsonObject& object) {
  if (!(step.step_s > 0)) object.fail("step_s", "is 0, wanted the seconds of the step");
}

struct Options {
  control::ControllerOptions controller;
  Bytes memory = cost::kUnlimitedMemory;
  std::string balancer = "optimal";
};

void list_fields(IsA<Options> auto& options, auto& visit) {
  auto& controller = options.controller;
  visit.optional("balancer", options.balancer);
  visit.optional("minimum_gain", controller.policy.minimum_gain, kCount);
  visit.optional("noise_factor", controller.policy.noise_factor, kCount);
  visit.optional("window", controller.window, kPositive);
  visit.optional("micro_batches", controller.micro_batches, kPositive);
  visit.optional("accumulation", controller.accumulation, kPositive);
  visit.optional("steps", controller.steps, kCount);
  visit.optional("horizon_steps", controller.horizon_steps, kCount);
  visit.optional("memory_bytes", options.memory);
}

Expected<control::DecisionsOptions> read_options(const Json& json) {
  DYNMO_ASSIGN(Options options, parse_fields<Options>(json, "options"));
  DYNMO_ASSIGN(options.controller.policy.balancer, plan::parse_balancer(options.balancer));
  return control::DecisionsOptions{.controller = options.controller, .memory = options.memory};
}

}  // namespace

Expected<Decisions> Decisions::make(const Json& known, int ranks, const Json& options,
                                    std::int64_t first_step) {
  DYNMO_ASSIGN(cost::ModelCost model, cost::parse_profile(known, "known"));
  DYNMO_ASSIGN(const control::DecisionsOptions read, read_options(options));
  if (ranks < 1 || first_step < 0) {
    return make_error(ErrorCode::kBadInput,
                      "dynmo: ranks={}, first_step={}, wanted 1 rank or more and a step", ranks,
                      first_step);
  }
  const int layers = static_cast<int>(model.layers.size());
  control::Controller controller(std::move(model), read.controller, first_step);
  return Decisions(control::Decisions(std::move(controller), ranks, read), layers);
}

Expected<plan::Plan> Decisions::read_plan(const Json& json) const {
  DYNMO_ASSIGN(plan::Plan plan, plan::parse_plan(json, "plan"));
  DYNMO_TRY(plan::validate(plan, layers_));
  return plan;
}

Expected<Json> Decisions::observe(const Json& step, const Json& plan, int frozen_layers) {
  DYNMO_ASSIGN(const Step read, parse_fields<Step>(step, "step"));
  DYNMO_ASSIGN(const plan::Plan under, read_plan(plan));
  if (std::ssize(read.layers) != layers_ || read.ranks.empty() ||
      std::ssize(read.ranks) % under.ranks != 0) {
    return make_error(ErrorCode::kBadInput,
                      "step: it has {} layers and {} ranks, wanted {} and {} for each replica",
                      read.layers.size(), read.ranks.size(), layers_, under.ranks);
  }
  const control::StepStats stats = control::step_stats(read.ranks);
  decisions_.observe({.layers = read.layers, .stats = stats}, under, frozen_layers);
  std::vector<double> busy_s;
  std::vector<Rank> positions;
  for (const control::RankFigures& rank : read.ranks) {
    positions.emplace_back(static_cast<int>(std::ssize(busy_s) % under.ranks));
    busy_s.push_back(rank.busy_s);
  }
  return Json{{"imbalance", control::imbalance(busy_s, positions, under)},
              {"bubble", control::bubble(busy_s, read.step_s)},
              {"migrate_s", stats.migrate_s}};
}

Expected<void> Decisions::announce(std::string_view what, std::int64_t step) {
  for (const auto& [name, value] : kAnnounced) {
    if (name != what) continue;
    decisions_.announce(value, step);
    return {};
  }
  return make_error(ErrorCode::kBadInput,
                    "dynmo: announced '{}', wanted nothing, work, predicted or known", what);
}

Expected<Json> Decisions::decide(const Json& plan, std::int64_t step, int frozen_layers) {
  DYNMO_ASSIGN(const plan::Plan current, read_plan(plan));
  const plan::LayerSet none;
  DYNMO_ASSIGN(
      const auto decision,
      decisions_.decide(
          {.plan = current, .step = step, .frozen_layers = frozen_layers, .recomputed = none}));
  if (!decision) return Json(nullptr);
  newest_ = observe::decision_event(*decision);
  Json json = newest_;
  json.erase("taken");
  json["migrate"] = decision->migrate;
  Json moves = Json::array();
  for (const plan::LayerMove& move : decision->migration.moves) {
    moves.push_back({{"layer", move.layer.value},
                     {"from", move.from.value},
                     {"to", move.to.value},
                     {"bytes", move.bytes.value}});
  }
  json["moves"] = std::move(moves);
  json["moved_bytes"] = decision->migration.bytes().value;
  return json;
}

Expected<double> Decisions::predicted_step_s(const Json& plan, std::int64_t step,
                                             int frozen_layers) {
  DYNMO_ASSIGN(const plan::Plan current, read_plan(plan));
  const plan::LayerSet none;
  return decisions_.predicted_step_s(
      {.plan = current, .step = step, .frozen_layers = frozen_layers, .recomputed = none});
}

Json Decisions::costs(int frozen_layers) const {
  const auto costs = decisions_.costs(frozen_layers);
  return costs ? cost::profile_json(*costs) : Json(nullptr);
}

void bind_decisions(nb::module_& module) {
  nb::class_<Decisions>(module, "Decisions",
                        "The controller of a run: told what all ranks measured, asked before a "
                        "step. Ranks that are told alike decide alike.")
      .def(nb::new_([](const Document& known, int ranks, const Document& options,
                       std::int64_t first_step) {
             return std::make_unique<Decisions>(value_or_raise(
                 Decisions::make(to_json(known), ranks, to_json(options), first_step)));
           }),
           nb::arg("known"), nb::arg("ranks"), nb::arg("options"), nb::arg("first_step") = 0)
      .def(
          "observe",
          [](Decisions& self, const nb::dict& step, const nb::dict& plan, int frozen_layers) {
            const Json read = to_json(step), under = to_json(plan);
            auto facts = [&] {
              const nb::gil_scoped_release release;
              return self.observe(read, under, frozen_layers);
            }();
            return to_python(value_or_raise(std::move(facts)));
          },
          nb::arg("step"), nb::arg("plan"), nb::arg("frozen_layers"),
          nb::sig("def observe(self, step: dict[str, typing.Any], plan: dict[str, typing.Any], "
                  "frozen_layers: int) -> dict[str, float]"))
      .def(
          "announce",
          [](Decisions& self, const std::string& what, std::int64_t step) {
            raise_if_error(self.announce(what, step));
          },
          nb::arg("what"), nb::arg("step"))
      .def(
          "decide",
          [](Decisions& self, const nb::dict& plan, std::int64_t step, int frozen_layers) {
            const Json under = to_json(plan);
            auto decided = [&] {
              const nb::gil_scoped_release release;
              return self.decide(under, step, frozen_layers);
            }();
            return to_python(value_or_raise(std::move(decided)));
          },
          nb::arg("plan"), nb::arg("step"), nb::arg("frozen_layers"),
          nb::sig("def decide(self, plan: dict[str, typing.Any], step: int, frozen_layers: int) "
                  "-> dict[str, typing.Any] | None"))
      .def(
          "predicted_step_s",
          [](Decisions& self, const nb::dict& plan, std::int64_t step, int frozen_layers) {
            const Json under = to_json(plan);
            const auto predicted = [&] {
              const nb::gil_scoped_release release;
              return self.predicted_step_s(under, step, frozen_layers);
            }();
            return value_or_raise(predicted);
          },
          nb::arg("plan"), nb::arg("step"), nb::arg("frozen_layers"),
          nb::sig("def predicted_step_s(self, plan: dict[str, typing.Any], step: int, "
                  "frozen_layers: int) -> float"))
      .def("moved", &Decisions::moved, nb::arg("bytes"))
      .def("not_moved", &Decisions::not_moved)
      .def_prop_ro("plan_s", &Decisions::plan_s)
      .def(
          "costs",
          [](const Decisions& self, int frozen_layers) {
            return to_python(self.costs(frozen_layers));
          },
          nb::arg("frozen_layers"),
          nb::sig("def costs(self, frozen_layers: int) -> dict[str, typing.Any] | None"));
}

}  // namespace dynmo::python
