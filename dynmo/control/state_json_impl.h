// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes a controller's state as JSON and reads it. A struct lists its fields once:
//
//   template <typename Self, typename Visit>
//   static void fields(Self& self, Visit visit) { visit("name", self.name); ... }
//
// Finite doubles read back bit for bit, because the writer prints the shortest exact text.

#include <string>
#include <type_traits>
#include <utility>

#include "dynmo/core/json.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/layer_sample.h"
#include "dynmo/plan/plan.h"

namespace dynmo::control {

template <typename Self, typename Visit>
void fields_of(Self& self, Visit visit) {
  using T = std::remove_const_t<Self>;
  if constexpr (std::is_same_v<T, cost::LayerSample>) {
    visit("f", self.time.forward_s);
    visit("i", self.time.input_gradient_s);
    visit("w", self.time.weight_gradient_s);
    visit("u", self.update_s);
    visit("s", self.stash_bytes);
    visit("b", self.boundary_bytes);
    visit("n", self.work);
  } else if constexpr (std::is_same_v<T, cost::StepSample>) {
    visit("overhead_s", self.overhead_s);
    visit("action_s", self.action_s);
    visit("message_s", self.message_s);
    visit("reduction_bytes_per_s", self.reduction_bytes_per_s);
  } else if constexpr (std::is_same_v<T, cost::Charges>) {
    visit("plan_s", self.plan_s);
    visit("move_fixed_s", self.move_fixed_s);
    visit("bytes_per_s", self.bytes_per_s);
  } else if constexpr (std::is_same_v<T, plan::PlanStage>) {
    visit("rank", self.rank);
    visit("first", self.layers.first);
    visit("count", self.layers.count);
  } else {
    T::fields(self, visit);
  }
}

template <typename T>
concept IsOptional = requires(const T& value) {
  value.has_value();
  *value;
};
template <typename T>
concept IsMap = requires {
  typename T::mapped_type;
};
template <typename T>
concept IsSequence = requires(T& value) {
  value.emplace_back();
};
template <typename T>  // an id, or bytes
concept IsNumber = requires(const T& value) {
  value.value;
}
&&!IsOptional<T>;

template <typename T>
[[nodiscard]] Json to_state(const T& value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return value;
  } else if constexpr (IsOptional<T>) {
    return value ? to_state(*value) : Json();
  } else if constexpr (IsMap<T>) {
    Json json = Json::array();
    for (const auto& [key, element] : value) {
      json.push_back(Json::array({to_state(key), to_state(element)}));
    }
    return json;
  } else if constexpr (IsSequence<T>) {
    Json json = Json::array();
    for (const auto& element : value) json.push_back(to_state(element));
    return json;
  } else if constexpr (IsNumber<T>) {
    return value.value;
  } else {
    Json json = Json::object();
    fields_of(value, [&](const char* key, const auto& field) { json[key] = to_state(field); });
    return json;
  }
}

// Reads a value. Throws Json::exception if a value is missing or has another type.
template <typename T>
void from_state(const Json& json, T& value) {
  if constexpr (std::is_arithmetic_v<T>) {
    value = json.get<T>();
  } else if constexpr (IsOptional<T>) {
    value.reset();
    if (!json.is_null()) from_state(json, value.emplace());
  } else if constexpr (IsMap<T>) {
    value.clear();
    for (const Json& pair : json) {
      typename T::key_type key{};
      from_state(pair.at(0), key);
      from_state(pair.at(1), value[key]);
    }
  } else if constexpr (IsSequence<T>) {
    value.clear();
    for (const Json& element : json) from_state(element, value.emplace_back());
  } else if constexpr (IsNumber<T>) {
    from_state(json, value.value);
  } else {
    fields_of(value, [&](const char* key, auto& field) { from_state(json.at(key), field); });
  }
}

}  // namespace dynmo::control
