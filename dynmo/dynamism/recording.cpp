// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/recording.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "dynmo/cost/layer_cost.h"

namespace dynmo::dynamism {
namespace {

constexpr double kMaxRate = 1e18;  // bytes a second

struct LayerColumn {
  const char* key;
  double (*get)(const cost::LayerSample&);
  void (*set)(cost::LayerSample&, double);
};
constexpr std::array<LayerColumn, 4> kColumns = {{
    {"forward_s", [](const cost::LayerSample& s) { return s.time.forward_s; },
     [](cost::LayerSample& s, double v) { s.time.forward_s = v; }},
    {"input_gradient_s", [](const cost::LayerSample& s) { return s.time.input_gradient_s; },
     [](cost::LayerSample& s, double v) { s.time.input_gradient_s = v; }},
    {"weight_gradient_s", [](const cost::LayerSample& s) { return s.time.weight_gradient_s; },
     [](cost::LayerSample& s, double v) { s.time.weight_gradient_s = v; }},
    {"update_s", [](const cost::LayerSample& s) { return s.update_s; },
     [](cost::LayerSample& s, double v) { s.update_s = v; }},
}};

struct OverheadKey {
  const char* key;
  std::optional<double> cost::StepSample::*field;
  double maximum;
};
constexpr std::array<OverheadKey, 4> kOverheads = {{
    {"overhead_s", &cost::StepSample::overhead_s, cost::kMaxSeconds},
    {"action_s", &cost::StepSample::action_s, cost::kMaxSeconds},
    {"message_s", &cost::StepSample::message_s, cost::kMaxSeconds},
    {"reduction_bytes_per_s", &cost::StepSample::reduction_bytes_per_s, kMaxRate},
}};

struct Charge {
  const char* key;
  double cost::Charges::*field;
  double maximum;
};
constexpr std::array<Charge, 3> kCharges = {{
    {"plan_s", &cost::Charges::plan_s, cost::kMaxSeconds},
    {"move_fixed_s", &cost::Charges::move_fixed_s, cost::kMaxSeconds},
    {"move_bytes_per_s", &cost::Charges::bytes_per_s, kMaxRate},
}};

// Above 0 for a rate; times may be below 0 where they are differences of two clocks.
double limited(JsonObject& object, const char* key, double value, double maximum) {
  if (value < -maximum || value > maximum) {
    object.fail(key, fmt::format("is {}, wanted at most {:g}", value, maximum));
  }
  return value;
}

// The bytes that layers send, where they were measured: in models whose boundaries change.
constexpr const char* kBoundary = "boundary_bytes";

void read_boundaries(JsonObject& object, const Json& json, std::vector<cost::LayerSample>& layers) {
  object.ignore(kBoundary);
  const auto found = json.find(kBoundary);
  if (found == json.end()) return;
  if (!found->is_array() || found->size() != layers.size()) {
    object.fail(kBoundary,
                fmt::format("is not an array of {} elements, one a layer", layers.size()));
    return;
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Json& value = (*found)[i];
    const bool valid = value.is_number_integer() && value.get<double>() >= 0 &&
                       value.get<double>() <= static_cast<double>(cost::kMaxBytes.value);
    if (!valid) {
      object.fail(fmt::format("{}/{}", kBoundary, i),
                  fmt::format("is {}, wanted whole bytes from 0 to 2^50", value.dump()));
      return;
    }
    layers[i].boundary_bytes = Bytes{value.get<std::int64_t>()};
  }
}

// The work of layers, where sources have counted it.
constexpr const char* kWork = "work";
constexpr double kMaxWork = 1e18;

void read_work(JsonObject& object, const Json& json, std::vector<cost::LayerSample>& layers) {
  object.ignore(kWork);
  const auto found = json.find(kWork);
  if (found == json.end()) return;
  if (!found->is_array() || found->size() != layers.size()) {
    object.fail(kWork, fmt::format("is not an array of {} elements, one a layer", layers.size()));
    return;
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Json& value = (*found)[i];
    const bool valid =
        value.is_number() && value.get<double>() >= 0 && value.get<double>() <= kMaxWork;
    if (!valid) {
      object.fail(fmt::format("{}/{}", kWork, i),
                  fmt::format("is {}, wanted a number from 0 to {:g}", value.dump(), kMaxWork));
      return;
    }
    layers[i].work = value.get<double>();
  }
}

void read_column(JsonObject& object, const Json& json, const LayerColumn& column,
                 std::vector<cost::LayerSample>& layers) {
  object.ignore(column.key);
  const auto found = json.find(column.key);
  if (found == json.end() || !found->is_array() || found->size() != layers.size()) {
    object.fail(column.key,
                fmt::format("is not an array of {} elements, one a layer", layers.size()));
    return;
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Json& value = (*found)[i];
    const bool valid =
        value.is_number() && value.get<double>() >= 0 && value.get<double>() <= cost::kMaxSeconds;
    if (!valid) {
      object.fail(fmt::format("{}/{}", column.key, i),
                  fmt::format("is {}, wanted seconds from 0 to 1e6", value.dump()));
      return;
    }
    column.set(layers[i], value.get<double>());
  }
}

Expected<plan::Plan> read_plan(const Json& json, const char* key, const std::string& origin,
                               int layers) {
  const auto found = json.find(key);
  if (found == json.end()) {
    return make_error(ErrorCode::kBadInput, "{}: /run/{} is missing, wanted a plan", origin, key);
  }
  DYNMO_ASSIGN(plan::Plan plan, plan::parse_plan(*found, fmt::format("{}: /run/{}", origin, key)));
  DYNMO_TRY(plan::validate(plan, layers));
  return plan;
}

}  // namespace

Json to_json(const cost::Observation& observation) {
  Json json = Json::object();
  for (const LayerColumn& column : kColumns) {
    Json& values = json[column.key] = Json::array();
    for (const cost::LayerSample& layer : observation.layers) values.push_back(column.get(layer));
  }
  const auto changes = [](const cost::LayerSample& layer) {
    return layer.boundary_bytes > Bytes{0};
  };
  if (std::ranges::any_of(observation.layers, changes)) {
    Json& values = json[kBoundary] = Json::array();
    for (const cost::LayerSample& layer : observation.layers) {
      values.push_back(layer.boundary_bytes.value);
    }
  }
  const auto counted = [](const cost::LayerSample& layer) { return layer.work > 0; };
  if (std::ranges::any_of(observation.layers, counted)) {
    Json& values = json[kWork] = Json::array();
    for (const cost::LayerSample& layer : observation.layers) values.push_back(layer.work);
  }
  for (const OverheadKey& overhead : kOverheads) {
    if (const auto& value = observation.overhead.*overhead.field) json[overhead.key] = *value;
  }
  for (const Charge& charge : kCharges) json[charge.key] = observation.charges.*charge.field;
  return json;
}

Json to_json(const RunStart& start) {
  Json measured = Json::array();
  for (const cost::Observation& step : start.measured) measured.push_back(to_json(step));
  return {{"plan", plan::to_json(start.plan)},
          {"measured_under", plan::to_json(start.measured_under)},
          {"measured", std::move(measured)},
          {"replicas", start.replicas},
          {"accumulation", start.accumulation}};
}

Expected<cost::Observation> parse_observation(const Json& json, const std::string& origin,
                                              int layers) {
  JsonObject object(json, origin);
  cost::Observation observation;
  observation.layers.resize(static_cast<std::size_t>(layers));
  if (json.is_object()) {
    for (const LayerColumn& column : kColumns) {
      read_column(object, json, column, observation.layers);
    }
    read_boundaries(object, json, observation.layers);
    read_work(object, json, observation.layers);
    for (const OverheadKey& overhead : kOverheads) {
      if (!json.contains(overhead.key)) continue;
      observation.overhead.*overhead.field =
          limited(object, overhead.key, object.number(overhead.key), overhead.maximum);
    }
    for (const Charge& charge : kCharges) {
      observation.charges.*charge.field =
          limited(object, charge.key, object.number(charge.key), charge.maximum);
      if (observation.charges.*charge.field < 0) object.fail(charge.key, "is below 0");
    }
  }
  DYNMO_TRY(object.finish());
  return observation;
}

Expected<RunStart> parse_run_start(const Json& json, const std::string& origin, int layers) {
  JsonObject object(json, origin, "/run");
  for (const char* key : {"plan", "measured_under", "measured"}) object.ignore(key);
  RunStart start;
  start.replicas = static_cast<int>(object.integer("replicas"));
  start.accumulation = static_cast<int>(object.integer("accumulation"));
  constexpr int kMost = 1 << 20;
  for (const auto& [key, value] :
       {std::pair("replicas", start.replicas), std::pair("accumulation", start.accumulation)}) {
    if (value < 1 || value > kMost) {
      object.fail(key, fmt::format("is {}, wanted 1 to {}", value, kMost));
    }
  }
  DYNMO_TRY(object.finish());
  DYNMO_ASSIGN(start.plan, read_plan(json, "plan", origin, layers));
  DYNMO_ASSIGN(start.measured_under, read_plan(json, "measured_under", origin, layers));
  const auto measured = json.find("measured");
  if (measured == json.end() || !measured->is_array()) {
    return make_error(ErrorCode::kBadInput, "{}: /run/measured is missing, wanted an array",
                      origin);
  }
  for (const Json& step : *measured) {
    DYNMO_ASSIGN(cost::Observation observation, parse_observation(step, origin, layers));
    start.measured.push_back(std::move(observation));
  }
  return start;
}

}  // namespace dynmo::dynamism
