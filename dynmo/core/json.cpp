// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/json.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "dynmo/core/files.h"
#include "dynmo/core/nearest.h"

namespace dynmo {

Expected<Json> read_json(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const std::string text, read_file(path));
  return parse_json(text, path.string());
}

Expected<Json> parse_json(std::string_view text, std::string_view origin) {
  // Nothing of ours nests deeper; the library's recursion would follow a hostile file off the
  // stack.
  constexpr int kMostLevels = 64;
  bool too_deep = false;
  const auto limit = [&](int depth, Json::parse_event_t, Json&) {
    too_deep = too_deep || depth > kMostLevels;
    return !too_deep;
  };
  try {
    Json json = Json::parse(text, limit);
    if (!too_deep) return json;
    return make_error(ErrorCode::kBadInput, "{}: wanted JSON of at most {} levels", origin,
                      kMostLevels);
  } catch (const Json::exception& fault) {
    std::string why = fault.what();
    if (const auto start = why.find("] "); start != std::string::npos) why = why.substr(start + 2);
    std::replace(why.begin(), why.end(), '\n', ' ');
    return make_error(ErrorCode::kBadInput, "{}: wanted JSON: {}", origin, why);
  }
}

JsonObject::JsonObject(const Json& json, std::string origin, std::string pointer)
    : json_(&json), origin_(std::move(origin)), pointer_(std::move(pointer)) {
  if (!json.is_object()) {
    error_ = make_error(ErrorCode::kBadInput, "{}: {} is {}, wanted an object", origin_,
                        pointer_.empty() ? "/" : pointer_, json.type_name());
  }
}

const Json* JsonObject::find(const std::string& key) {
  known_.push_back(key);
  if (error_) return nullptr;
  const auto found = json_->find(key);
  return found == json_->end() ? nullptr : &*found;
}

const Json* JsonObject::require(const std::string& key, bool has_fallback) {
  const Json* found = find(key);
  if (found == nullptr && !has_fallback && !error_) fail(key, "is missing");
  return found;
}

void JsonObject::fail(const std::string& key, std::string_view message) {
  if (error_) return;
  error_ = make_error(ErrorCode::kBadInput, "{}: {}/{} {}", origin_, pointer_, key, message);
}

double JsonObject::number(const std::string& key, std::optional<double> fallback) {
  const Json* found = require(key, fallback.has_value());
  if (found == nullptr) return fallback.value_or(0);
  if (!found->is_number() || !std::isfinite(found->get<double>())) {
    fail(key, fmt::format("is {}, wanted a finite number", found->dump()));
    return fallback.value_or(0);
  }
  return found->get<double>();
}

std::int64_t JsonObject::integer(const std::string& key, std::optional<std::int64_t> fallback) {
  const Json* found = require(key, fallback.has_value());
  if (found == nullptr) return fallback.value_or(0);
  const bool too_large = found->is_number_unsigned() &&
                         found->get<std::uint64_t>() >
                             static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (!found->is_number_integer() || too_large) {
    fail(key, fmt::format("is {}, wanted a whole number", found->dump()));
    return fallback.value_or(0);
  }
  return found->get<std::int64_t>();
}

Bytes JsonObject::bytes(const std::string& key, std::optional<Bytes> fallback) {
  std::optional<std::int64_t> amount;
  if (fallback) amount = fallback->value;
  const Bytes read{integer(key, amount)};
  if (read < Bytes{0}) fail(key, fmt::format("is {}, wanted bytes, 0 or more", read.value));
  return read;
}

bool JsonObject::boolean(const std::string& key, std::optional<bool> fallback) {
  const Json* found = require(key, fallback.has_value());
  if (found == nullptr) return fallback.value_or(false);
  if (!found->is_boolean()) {
    fail(key, fmt::format("is {}, wanted true or false", found->dump()));
    return fallback.value_or(false);
  }
  return found->get<bool>();
}

std::string JsonObject::string(const std::string& key, std::optional<std::string> fallback) {
  const Json* found = require(key, fallback.has_value());
  if (found == nullptr) return std::move(fallback).value_or("");
  if (!found->is_string()) {
    fail(key, fmt::format("is {}, wanted a string", found->dump()));
    return std::move(fallback).value_or("");
  }
  return found->get<std::string>();
}

std::vector<JsonObject> JsonObject::objects(const std::string& key) {
  const Json* found = require(key, /*has_fallback=*/false);
  std::vector<JsonObject> elements;
  if (found == nullptr) return elements;
  if (!found->is_array()) {
    fail(key, fmt::format("is {}, wanted an array", found->type_name()));
    return elements;
  }
  for (std::size_t i = 0; i < found->size(); ++i) {
    elements.emplace_back((*found)[i], origin_, fmt::format("{}/{}/{}", pointer_, key, i));
  }
  return elements;
}

std::optional<JsonObject> JsonObject::object(const std::string& key) {
  const Json* found = find(key);
  if (found == nullptr) return std::nullopt;
  return JsonObject(*found, origin_, fmt::format("{}/{}", pointer_, key));
}

void JsonObject::ignore(const std::string& key) { known_.push_back(key); }

void JsonObject::expect_format(std::string_view format) {
  const std::string found = string("format");
  if (!error_ && found != format) {
    fail("format", fmt::format("is '{}', wanted '{}'", found, format));
  }
}

Expected<void> JsonObject::finish() const {
  if (error_) return *error_;
  for (const auto& [key, value] : json_->items()) {
    if (std::find(known_.begin(), known_.end(), key) == known_.end()) {
      return make_error(ErrorCode::kBadInput, "{}: {}/{} is not a known key{}", origin_, pointer_,
                        key, suggestion(key, known_));
    }
  }
  return {};
}

}  // namespace dynmo
