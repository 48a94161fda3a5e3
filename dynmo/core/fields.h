// SPDX-License-Identifier: Apache-2.0
#pragma once

// A struct lists its fields once, and its JSON reader and its JSON writer follow the list:
//
//   void list_fields(IsA<Link> auto& link, auto& visit) {
//     visit.optional("latency_s", link.latency_s, kSeconds);
//     visit.left_out("bandwidth_bytes_per_s", link.bandwidth_bytes_per_s, kInfinity, kAboveZero);
//   }
//   // If fields depend on one another.
//   void check_fields(const IsA<Link> auto& link, JsonObject& object) { ... }
//
// The order of the list is the order of the keys. A list stands in the namespace of its struct, in
// the source that reads and writes it. If other sources need the struct, that source defines
// to_json() and read_fields() for it.

#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"

namespace dynmo {

template <typename T, typename Struct>
concept IsA = std::same_as<std::remove_const_t<T>, Struct>;

// The numbers that a field takes. Both ends are included, except `min` if `above_min`.
struct Limits {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  const char* wanted = "";  // for errors, "seconds from 0 to 1"; "": the two numbers
  bool above_min = false;
};
inline constexpr Limits kCount{.min = 0, .wanted = "0 or more"};

namespace internal {

template <typename T>
inline constexpr bool kIsOptional = false;
template <typename T>
inline constexpr bool kIsOptional<std::optional<T>> = true;
template <typename T>
inline constexpr bool kIsVector = false;
template <typename T>
inline constexpr bool kIsVector<std::vector<T>> = true;

[[nodiscard]] bool holds(const Limits& limits, double value);
// Reads one value. If the key is absent, `value` is unchanged, and that is a fault unless
// `may_lack`.
void read_value(JsonObject& object, const char* key, double& value, const Limits& limits,
                bool may_lack);
void read_value(JsonObject& object, const char* key, std::int64_t& value, const Limits& limits,
                bool may_lack);
void read_value(JsonObject& object, const char* key, std::uint64_t& value, bool may_lack);
void read_value(JsonObject& object, const char* key, Bytes& value, const Limits& limits,
                bool may_lack);
void read_value(JsonObject& object, const char* key, bool& value, bool may_lack);
void read_value(JsonObject& object, const char* key, std::string& value, bool may_lack);
void read_value(JsonObject& object, const char* key, Digest& value, bool may_lack);
void read_value(JsonObject& object, const char* key, std::vector<std::uint64_t>& values,
                bool may_lack);
void read_measured(JsonObject& object, const char* key, double& value, bool may_lack);
[[nodiscard]] Json measured(double value);
void read_figures(JsonObject& object, const char* key, Json& value);
// kWhole: whole numbers only. are_numbers() returns whether a list has 1 to `most` finite numbers
// of `kind` within `limits`.
enum class Numbers { kAny, kWhole };
[[nodiscard]] bool are_numbers(const Json& list, Numbers kind, std::size_t most,
                               const Limits& limits);
[[nodiscard]] Json shortest(double value);
// Returns `limits` cut to the range from `min` to `max`.
[[nodiscard]] Limits within(Limits limits, double min, double max);

}  // namespace internal

// Reads the fields of a list. Faults are recorded in `object`.
class FieldReader {
 public:
  explicit FieldReader(JsonObject& object) : object_(object) {}

  // Reads a field, which may be absent only if it is a std::optional.
  template <typename T>
  void operator()(const char* key, T& value, const Limits& limits = {}) {
    read(key, value, limits, /*may_lack=*/false);
  }
  // Reads a field. If it is absent, `value` is unchanged.
  template <typename T>
  void optional(const char* key, T& value, const Limits& limits = {}) {
    read(key, value, limits, /*may_lack=*/true);
  }
  // Reads a field. If it is absent, sets `value` to `absent`, which FieldWriter does not write.
  template <typename T>
  void left_out(const char* key, T& value, const std::type_identity_t<T>& absent,
                const Limits& limits = {}) {
    value = absent;
    read(key, value, limits, /*may_lack=*/true);
  }
  // Reads a number, and NaN for null, because JSON has no NaN. So a diverged run can still be
  // examined.
  void measured(const char* key, double& value) {
    internal::read_measured(object_, key, value, /*may_lack=*/false);
  }
  void optional_measured(const char* key, double& value) {
    internal::read_measured(object_, key, value, /*may_lack=*/true);
  }
  void optional_measured(const char* key, std::optional<double>& value) {
    value.reset();
    if (object_.value(key) != nullptr) measured(key, value.emplace());
  }
  // Reads a number. FieldWriter writes it without a fraction if it is whole.
  void number(const char* key, double& value) { (*this)(key, value); }
  // Reads a list of 1 to `most` numbers. Refuses any other value with the text `refused`.
  template <typename T>
  void numbers(const char* key, std::vector<T>& values, std::size_t most, const Limits& limits,
               std::string_view refused) {
    using internal::Numbers;
    const Json* given = object_.value(key);
    const auto kind = std::integral<T> ? Numbers::kWhole : Numbers::kAny;
    if (given != nullptr && internal::are_numbers(*given, kind, most, limits)) {
      given->get_to(values);
    } else {
      object_.fail(key, refused);
    }
  }
  // Reads a list, empty if the key is absent. FieldWriter does not write an empty list.
  template <typename T>
  void unless_empty(const char* key, std::vector<T>& values) {
    optional(key, values);
  }
  // Reads any object, empty if the key is absent. FieldWriter does not write an empty object.
  void figures(const char* key, Json& value) { internal::read_figures(object_, key, value); }
  // Reads a text or a number that `to(value)` made. `from` converts it back and returns an
  // Expected. A message has the key before the text of the error of `from`.
  template <typename T, typename To, typename From>
  void mapped(const char* key, T& value, To to, From from) {
    if (object_.value(key) == nullptr) return object_.fail(key, "is missing");
    optional_mapped(key, value, to, from);
  }
  template <typename T, typename To, typename From>
  void optional_mapped(const char* key, T& value, To to, From from) {
    using Result = decltype(to(value));
    std::conditional_t<std::is_convertible_v<Result, std::string_view>, std::string, Result>
        given{};
    if (object_.value(key) == nullptr) return;
    (*this)(key, given);
    const auto read = from(given);
    if (read) {
      value = *read;
    } else {
      object_.fail(key, read.error().message);
    }
  }
  // Reads any JSON. If it is absent, `value` is unchanged. FieldWriter does not write null.
  void any(const char* key, Json& value) {
    if (const Json* given = object_.value(key)) value = *given;
  }
  // Reads a list of objects. Each has the fields that `list` visits of an element.
  template <typename T, typename List>
  void each(const char* key, std::vector<T>& values, List list) {
    values.clear();
    for (JsonObject& inner : object_.objects(key)) {
      FieldReader reader(inner);
      list(values.emplace_back(), reader);
      object_.take_fault(inner);
    }
  }
  void format(std::string_view format) { object_.expect_format(format); }
  // Reads the object below `key` with the fields that `list` visits, or nothing if it is absent.
  template <typename List>
  void optional_group(const char* key, List list) {
    auto inner = object_.object(key);
    if (!inner) return;
    FieldReader reader(*inner);
    list(reader);
    object_.take_fault(*inner);
  }

 private:
  template <typename T>
  void read(const char* key, T& value, const Limits& limits, bool may_lack);

  JsonObject& object_;
};

// Writes the fields of a list.
class FieldWriter {
 public:
  explicit FieldWriter(Json& json) : json_(json) {}

  template <typename T>
  void operator()(const char* key, const T& value, const Limits& limits = {});
  template <typename T>
  void optional(const char* key, const T& value, const Limits& limits = {}) {
    (*this)(key, value, limits);
  }
  template <typename T>
  void left_out(const char* key, const T& value, const std::type_identity_t<T>& absent,
                const Limits& limits = {}) {
    if (!(value == absent)) (*this)(key, value, limits);
  }
  void measured(const char* key, double value) { json_[key] = internal::measured(value); }
  void optional_measured(const char* key, std::optional<double> value) {
    if (value) measured(key, *value);
  }
  void number(const char* key, double value) { json_[key] = internal::shortest(value); }
  template <typename T>
  void numbers(const char* key, const std::vector<T>& values, std::size_t /*most*/,
               const Limits& /*limits*/, std::string_view /*refused*/) {
    json_[key] = values;
  }
  template <typename T>
  void unless_empty(const char* key, const std::vector<T>& values) {
    if (!values.empty()) (*this)(key, values);
  }
  void figures(const char* key, const Json& value) {
    if (!value.empty()) json_[key] = value;
  }
  template <typename T, typename To, typename From>
  void mapped(const char* key, const T& value, To to, From /*from*/);
  template <typename T, typename To, typename From>
  void optional_mapped(const char* key, const T& value, To to, From from) {
    mapped(key, value, to, from);
  }
  void any(const char* key, const Json& value) {
    if (!value.is_null()) json_[key] = value;
  }
  template <typename T, typename List>
  void each(const char* key, const std::vector<T>& values, List list) {
    Json& all = json_[key] = Json::array();
    for (const T& value : values) {
      FieldWriter writer(all.emplace_back(Json::object()));
      list(value, writer);
    }
  }
  void format(std::string_view format) { json_["format"] = format; }
  template <typename List>
  void optional_group(const char* key, List list) {
    FieldWriter writer(json_[key] = Json::object());
    list(writer);
  }

 private:
  Json& json_;
};

// Reads a T by its list_fields(), which this source must define. write_list() writes one.
template <typename T>
void read_list(JsonObject& object, T& value) {
  FieldReader reader(object);
  list_fields(value, reader);
  if constexpr (requires { check_fields(value, object); }) check_fields(value, object);
}
template <typename T>
[[nodiscard]] Json write_list(const T& value) {
  Json json = Json::object();
  FieldWriter writer(json);
  list_fields(value, writer);
  return json;
}

namespace internal {

template <typename T>
[[nodiscard]] Limits of_type(const Limits& limits) {
  return within(limits, static_cast<double>(std::numeric_limits<T>::min()),
                static_cast<double>(std::numeric_limits<T>::max()));
}

template <typename T>
void read_object(JsonObject& object, T& value) {
  if constexpr (requires { read_fields(object, value); }) {
    read_fields(object, value);
  } else {
    read_list(object, value);
  }
}

}  // namespace internal

// Returns the struct that `json` holds, or its first fault. T has a list in this source, or
// read_fields().
template <typename T>
[[nodiscard]] Expected<T> parse_fields(const Json& json, std::string_view origin,
                                       std::string pointer = "") {
  JsonObject object(json, std::string(origin), std::move(pointer));
  T value{};
  internal::read_object(object, value);
  DYNMO_TRY(object.finish());
  return value;
}

namespace internal {

template <typename T>
[[nodiscard]] Json written(const T& value) {
  if constexpr (std::same_as<T, Json>) {
    return value;
  } else if constexpr (requires { to_json(value); }) {
    return to_json(value);
  } else if constexpr (requires(FieldWriter & writer) { list_fields(value, writer); }) {
    return write_list(value);
  } else if constexpr (kIsVector<T>) {
    Json all = Json::array();
    for (const auto& element : value) all.push_back(written(element));
    return all;
  } else if constexpr (requires { value.value; }) {  // an id, or bytes
    return value.value;
  } else if constexpr (std::same_as<T, Digest>) {
    return value.hex();
  } else {
    return Json(value);
  }
}

}  // namespace internal

template <typename T>
void FieldWriter::operator()(const char* key, const T& value, const Limits& limits) {
  if constexpr (internal::kIsOptional<T>) {
    if (value) (*this)(key, *value, limits);
  } else {
    json_[key] = internal::written(value);
  }
}

template <typename T, typename To, typename From>
void FieldWriter::mapped(const char* key, const T& value, To to, From /*from*/) {
  json_[key] = internal::written(to(value));
}

template <typename T>
void FieldReader::read(const char* key, T& value, const Limits& limits, bool may_lack) {
  using internal::read_value;
  if constexpr (internal::kIsOptional<T>) {
    value.reset();
    if (object_.value(key) != nullptr) read(key, value.emplace(), limits, may_lack);
  } else if constexpr (requires { read_value(object_, key, value, limits, may_lack); }) {
    read_value(object_, key, value, limits, may_lack);
  } else if constexpr (requires { read_value(object_, key, value, may_lack); }) {
    read_value(object_, key, value, may_lack);
  } else if constexpr (std::integral<T>) {
    std::int64_t number = value;
    read_value(object_, key, number, internal::of_type<T>(limits), may_lack);
    value = static_cast<T>(number);
  } else if constexpr (internal::kIsVector<T>) {
    if (may_lack && object_.value(key) == nullptr) return;
    value.clear();
    if constexpr (requires { value.front().value; }) {  // ids
      std::vector<std::uint64_t> ids;
      read_value(object_, key, ids, may_lack);
      for (const std::uint64_t id : ids) value.push_back({id});
    } else {
      for (JsonObject& each : object_.objects(key)) {
        internal::read_object(each, value.emplace_back());
        object_.take_fault(each);
      }
    }
  } else if constexpr (requires { value.value; }) {  // an id
    read(key, value.value, limits, may_lack);
  } else {
    auto inner = object_.object(key);
    if (!inner && !may_lack) return object_.fail(key, "is missing");
    if (!inner) return;
    internal::read_object(*inner, value);
    object_.take_fault(*inner);
  }
}

}  // namespace dynmo
