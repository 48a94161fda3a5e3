// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/fields.h"

#include <algorithm>
#include <cmath>

namespace dynmo::internal {
namespace {

bool is_unsigned(const Json& json) {
  return json.is_number_unsigned() || (json.is_number_integer() && json.get<std::int64_t>() >= 0);
}

std::string wanted_by(const Limits& limits) {
  return *limits.wanted != '\0' ? limits.wanted : fmt::format("{} to {}", limits.min, limits.max);
}

template <typename T>
void check_limits(JsonObject& object, const char* key, T value, const Limits& limits) {
  if (holds(limits, static_cast<double>(value))) return;
  object.fail(key, fmt::format("is {}, wanted {}", value, wanted_by(limits)));
}

template <typename T>
std::optional<T> fallback(const T& value, bool may_lack) {
  return may_lack ? std::optional(value) : std::nullopt;
}

}  // namespace

bool holds(const Limits& limits, double value) {
  const bool enough = limits.above_min ? value > limits.min : value >= limits.min;
  return enough && value <= limits.max;
}

void read_value(JsonObject& object, const char* key, double& value, const Limits& limits,
                bool may_lack) {
  if (may_lack && object.value(key) == nullptr) return;
  value = object.number(key);
  check_limits(object, key, value, limits);
}

void read_value(JsonObject& object, const char* key, std::int64_t& value, const Limits& limits,
                bool may_lack) {
  if (may_lack && object.value(key) == nullptr) return;
  value = object.integer(key);
  check_limits(object, key, value, limits);
}

void read_value(JsonObject& object, const char* key, std::uint64_t& value, bool may_lack) {
  const Json* given = object.value(key);
  if (given == nullptr && !may_lack) return object.fail(key, "is missing");
  if (given == nullptr) return;
  if (is_unsigned(*given)) {
    value = given->get<std::uint64_t>();
  } else {
    object.fail(key, fmt::format("is {}, wanted a whole number, 0 or more", given->dump()));
  }
}

void read_value(JsonObject& object, const char* key, Bytes& value, const Limits& limits,
                bool may_lack) {
  if (may_lack && object.value(key) == nullptr) return;
  value = object.bytes(key);
  check_limits(object, key, value.value, limits);
}

void read_value(JsonObject& object, const char* key, bool& value, bool may_lack) {
  value = object.boolean(key, fallback(value, may_lack));
}

void read_value(JsonObject& object, const char* key, std::string& value, bool may_lack) {
  value = object.string(key, fallback(value, may_lack));
}

void read_value(JsonObject& object, const char* key, Digest& value, bool may_lack) {
  const auto given = parse_digest(object.string(key, fallback(value.hex(), may_lack)));
  if (!given) object.fail(key, "is not a digest, wanted 32 hexadecimal digits");
  value = given.value_or(Digest{});
}

void read_measured(JsonObject& object, const char* key, double& value, bool may_lack) {
  const Json* given = object.value(key);
  if (given != nullptr && given->is_null()) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else {
    read_value(object, key, value, {}, may_lack);
  }
}

Json measured(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

void read_figures(JsonObject& object, const char* key, Json& value) {
  const Json* given = object.value(key);
  value = given != nullptr ? *given : Json::object();
  if (!value.is_object()) object.fail(key, "is not an object");
}

bool are_numbers(const Json& list, Numbers kind, std::size_t most, const Limits& limits) {
  return list.is_array() && !list.empty() && list.size() <= most &&
         std::ranges::all_of(list, [&](const Json& number) {
           return (kind == Numbers::kWhole ? number.is_number_integer() : number.is_number()) &&
                  std::isfinite(number.get<double>()) && holds(limits, number.get<double>());
         });
}

Json shortest(double value) {
  const bool whole = value >= 0 && value < 0x1p53 &&
                     value == static_cast<double>(static_cast<std::int64_t>(value));
  return whole ? Json(static_cast<std::int64_t>(value)) : Json(value);
}

void read_value(JsonObject& object, const char* key, std::vector<std::uint64_t>& values,
                bool may_lack) {
  const Json* given = object.value(key);
  if (given == nullptr && !may_lack) return object.fail(key, "is missing");
  if (given == nullptr) return;
  if (!given->is_array()) return object.fail(key, "is not a list");
  for (const Json& each : *given) {
    if (!is_unsigned(each)) {
      return object.fail(fmt::format("{}/{}", key, values.size()),
                         fmt::format("is {}, wanted a whole number, 0 or more", each.dump()));
    }
    values.push_back(each.get<std::uint64_t>());
  }
}

Limits within(Limits limits, double min, double max) {
  limits.min = std::max(limits.min, min);
  limits.max = std::min(limits.max, max);
  return limits;
}

}  // namespace dynmo::internal
