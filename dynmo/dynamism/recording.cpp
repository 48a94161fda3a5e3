// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/recording.h"

#include <cstddef>
#include <set>
#include <string_view>
#include <utility>

#include "dynmo/core/fields.h"
#include "dynmo/cost/layer_cost.h"

namespace dynmo::dynamism {
namespace {

constexpr Limits kColumnSeconds{
    .min = 0, .max = cost::kMaxSeconds, .wanted = "seconds from 0 to 1e6"};
constexpr Limits kColumnBytes{.min = 0,
                              .max = static_cast<double>(cost::kMaxBytes.value),
                              .wanted = "whole bytes from 0 to 2^50"};
constexpr Limits kColumnWork{.min = 0, .max = 1e18, .wanted = "a number from 0 to 1e+18"};
// Times may be below 0 where they are differences of two clocks.
constexpr Limits kDifference{
    .min = -cost::kMaxSeconds, .max = cost::kMaxSeconds, .wanted = "at most 1e+06"};
constexpr Limits kRate{.min = 0, .max = 1e18, .wanted = "0 to 1e+18"};
constexpr Limits kCharge{.min = 0, .max = cost::kMaxSeconds, .wanted = "0 to 1e+06"};
constexpr Limits kParts{.min = 1, .max = 1 << 20, .wanted = "1 to 1048576"};

// Lists the columns of a step's samples. Below each key is a value for each layer.
void list_columns(auto& sample, auto& visit) {
  visit("forward_s", sample.time.forward_s, kColumnSeconds);
  visit("input_gradient_s", sample.time.input_gradient_s, kColumnSeconds);
  visit("weight_gradient_s", sample.time.weight_gradient_s, kColumnSeconds);
  visit("update_s", sample.update_s, kColumnSeconds);
  // Measured only in models whose boundaries change.
  visit.left_out("boundary_bytes", sample.boundary_bytes, Bytes{0}, kColumnBytes);
  // Written only if sources have counted it.
  visit.left_out("work", sample.work, 0, kColumnWork);
}

// Adds the values of one layer after another to their columns.
class ColumnWriter {
 public:
  explicit ColumnWriter(Json& json) : json_(json) {}
  void operator()(const char* key, double value, const Limits& /*limits*/) {
    json_[key].push_back(value);
  }
  void left_out(const char* key, double value, double /*absent*/, const Limits& limits) {
    (*this)(key, value, limits);
    if (value != 0) used_.insert(key);
  }
  void left_out(const char* key, Bytes value, Bytes absent, const Limits& /*limits*/) {
    json_[key].push_back(value.value);
    if (value != absent) used_.insert(key);
  }
  void erase_unused(const char* key) {
    if (!used_.contains(key)) json_.erase(key);
  }

 private:
  Json& json_;
  std::set<std::string_view> used_;
};

// Reads the values of one layer.
class ColumnReader {
 public:
  ColumnReader(JsonObject& object, std::size_t layers) : object_(object), layers_(layers) {}
  void next_layer() { ++layer_; }
  void operator()(const char* key, double& value, const Limits& limits) {
    const Json* given = element(key, object_.value(key));
    if (given != nullptr && check(key, *given, given->is_number(), limits)) given->get_to(value);
  }
  void left_out(const char* key, double& value, double /*absent*/, const Limits& limits) {
    if (object_.value(key) != nullptr) (*this)(key, value, limits);
  }
  void left_out(const char* key, Bytes& value, Bytes /*absent*/, const Limits& limits) {
    const Json* column = object_.value(key);
    const Json* given = column == nullptr ? nullptr : element(key, column);
    if (given != nullptr && check(key, *given, given->is_number_integer(), limits)) {
      given->get_to(value.value);
    }
  }

 private:
  const Json* element(const char* key, const Json* column) {
    if (column != nullptr && column->is_array() && column->size() == layers_) {
      return &(*column)[layer_];
    }
    object_.fail(key, fmt::format("is not an array of {} elements, one a layer", layers_));
    return nullptr;
  }
  bool check(const char* key, const Json& given, bool is_kind, const Limits& limits) {
    if (is_kind && internal::holds(limits, given.get<double>())) return true;
    object_.fail(fmt::format("{}/{}", key, layer_),
                 fmt::format("is {}, wanted {}", given.dump(), limits.wanted));
    return false;
  }

  JsonObject& object_;
  std::size_t layers_;
  std::size_t layer_ = 0;
};

void list_overhead(auto& overhead, auto& visit) {
  visit("overhead_s", overhead.overhead_s, kDifference);
  visit("action_s", overhead.action_s, kDifference);
  visit("message_s", overhead.message_s, kDifference);
  visit("reduction_bytes_per_s", overhead.reduction_bytes_per_s, kRate);
}

void list_charges(auto& charges, auto& visit) {
  visit("plan_s", charges.plan_s, kCharge);
  visit("move_fixed_s", charges.move_fixed_s, kCharge);
  visit("move_bytes_per_s", charges.bytes_per_s, kRate);
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
  ColumnWriter columns(json);
  for (const cost::LayerSample& layer : observation.layers) list_columns(layer, columns);
  columns.erase_unused("boundary_bytes");
  columns.erase_unused("work");
  FieldWriter writer(json);
  list_overhead(observation.overhead, writer);
  list_charges(observation.charges, writer);
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
  ColumnReader columns(object, observation.layers.size());
  for (cost::LayerSample& layer : observation.layers) {
    list_columns(layer, columns);
    columns.next_layer();
  }
  FieldReader reader(object);
  list_overhead(observation.overhead, reader);
  list_charges(observation.charges, reader);
  DYNMO_TRY(object.finish());
  return observation;
}

Expected<RunStart> parse_run_start(const Json& json, const std::string& origin, int layers) {
  JsonObject object(json, origin, "/run");
  for (const char* key : {"plan", "measured_under", "measured"}) object.ignore(key);
  RunStart start;
  FieldReader reader(object);
  reader("replicas", start.replicas, kParts);
  reader("accumulation", start.accumulation, kParts);
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
