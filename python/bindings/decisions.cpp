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

double seconds(JsonObject& object, const char* key) {
  const double value = object.number(key, 0.0);
  if (!(value >= 0 && value <= cost::kMaxSeconds)) {
    object.fail(key, fmt::format("is {}, wanted seconds from 0 to {}", value, cost::kMaxSeconds));
    return 0;
  }
  return value;
}

// Bytes from an exchange of doubles.
Bytes bytes(JsonObject& object, const char* key) {
  const double value = object.number(key, 0.0);
  if (!(value >= 0 && value <= static_cast<double>(cost::kMaxBytes.value))) {
    object.fail(key, fmt::format("is {}, wanted bytes from 0 to 2^50", value));
    return {};
  }
  return Bytes{static_cast<std::int64_t>(value)};
}

Expected<cost::LayerSample> read_layer(JsonObject& object) {
  cost::LayerSample layer;
  layer.time = {.forward_s = seconds(object, "forward_s"),
                .input_gradient_s = seconds(object, "input_gradient_s"),
                .weight_gradient_s = seconds(object, "weight_gradient_s")};
  layer.update_s = seconds(object, "update_s");
  layer.stash_bytes = bytes(object, "stash_bytes");
  layer.boundary_bytes = bytes(object, "boundary_bytes");
  DYNMO_TRY(object.finish());
  return layer;
}

struct Step {
  std::vector<cost::LayerSample> layers;
  std::vector<control::RankFigures> ranks;
  double step_s = 0;
};

control::RankFigures read_rank(JsonObject& object) {
  const auto number = [&](const char* key) {
    const double value = object.number(key, 0.0);
    if (!(value >= 0)) object.fail(key, fmt::format("is {}, wanted 0 or more", value));
    return value;
  };
  return {.busy_s = seconds(object, "busy_s"),
          .overhead_s = seconds(object, "overhead_s"),
          .plan_s = seconds(object, "plan_s"),
          .migrate_s = seconds(object, "migrate_s"),
          .action_overhead_s = seconds(object, "action_overhead_s"),
          .actions = number("actions"),
          .message_s = seconds(object, "message_s"),
          .reduction_bytes_per_s = number("reduction_bytes_per_s")};
}

Expected<Step> read_step(const Json& json) {
  JsonObject root(json, "step");
  Step step;
  for (JsonObject& object : root.objects("layers")) {
    DYNMO_ASSIGN(step.layers.emplace_back(), read_layer(object));
  }
  for (JsonObject& object : root.objects("ranks")) {
    step.ranks.push_back(read_rank(object));
    DYNMO_TRY(object.finish());
  }
  step.step_s = seconds(root, "step_s");
  if (!(step.step_s > 0)) root.fail("step_s", "is 0, wanted the seconds of the step");
  DYNMO_TRY(root.finish());
  return step;
}

int positive(JsonObject& object, const char* key, int fallback) {
  constexpr std::int64_t kMax = 1 << 20;
  const std::int64_t value = object.integer(key, fallback);
  if (value < 1 || value > kMax) {
    object.fail(key, fmt::format("is {}, wanted a whole number from 1 to {}", value, kMax));
    return fallback;
  }
  return static_cast<int>(value);
}

Expected<control::DecisionsOptions> read_options(const Json& json) {
  JsonObject object(json, "options");
  control::DecisionsOptions options;
  control::ControllerOptions& controller = options.controller;
  control::PolicyOptions& policy = controller.policy;
  DYNMO_ASSIGN(policy.balancer, plan::parse_balancer(object.string("balancer", "optimal")));
  policy.minimum_gain = object.number("minimum_gain", policy.minimum_gain);
  policy.noise_factor = object.number("noise_factor", policy.noise_factor);
  controller.window = positive(object, "window", controller.window);
  controller.micro_batches = positive(object, "micro_batches", controller.micro_batches);
  controller.accumulation = positive(object, "accumulation", controller.accumulation);
  controller.steps = object.integer("steps", 0);
  controller.horizon_steps = object.integer("horizon_steps", 0);
  options.memory = object.bytes("memory_bytes", options.memory);
  if (!(policy.minimum_gain >= 0)) object.fail("minimum_gain", "is below 0");
  if (!(policy.noise_factor >= 0)) object.fail("noise_factor", "is below 0");
  if (controller.steps < 0) object.fail("steps", "is below 0");
  if (controller.horizon_steps < 0) object.fail("horizon_steps", "is below 0");
  DYNMO_TRY(object.finish());
  return options;
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
  DYNMO_ASSIGN(const Step read, read_step(step));
  DYNMO_ASSIGN(const plan::Plan under, read_plan(plan));
  if (std::ssize(read.layers) != layers_ || std::ssize(read.ranks) != under.ranks) {
    return make_error(ErrorCode::kBadInput, "step: it has {} layers and {} ranks, wanted {} and {}",
                      read.layers.size(), read.ranks.size(), layers_, under.ranks);
  }
  const control::StepStats stats = control::step_stats(read.ranks);
  decisions_.observe({.layers = read.layers, .stats = stats}, under, frozen_layers);
  std::vector<double> busy_s;
  std::vector<Rank> positions;
  for (const control::RankFigures& rank : read.ranks) {
    positions.emplace_back(static_cast<int>(busy_s.size()));
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
