// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/tensor/features.h"

namespace dynmo::tensor {
namespace {

constexpr std::string_view kFormat = "dynmo-features-1";

Json to_json(const Spread& spread) {
  return {{"min", spread.min},
          {"mean", spread.mean},
          {"std", spread.std},
          {"cv", spread.cv},
          {"imbalance", spread.imbalance}};
}

// A whole number is written as one.
Json number(double value) {
  const bool whole = value >= 0 && value < 0x1p53 &&
                     value == static_cast<double>(static_cast<std::int64_t>(value));
  return whole ? Json(static_cast<std::int64_t>(value)) : Json(value);
}

Json to_json(const Distribution& distribution) {
  return {
      {"groups", number(distribution.groups)}, {"nonempty", distribution.nonempty},
      {"sum", number(distribution.sum)},       {"max", number(distribution.max)},
      {"all", to_json(distribution.all)},      {"of_nonempty", to_json(distribution.of_nonempty)}};
}

Json to_json(const std::vector<GroupFeatures>& groups) {
  Json all = Json::array();
  for (const GroupFeatures& group : groups) {
    Json json = {{"free", Json::array()}, {"entries", to_json(group.entries)}};
    for (const int mode : group.free) json["free"].push_back(mode + 1);
    if (group.fibers) json["fibers"] = to_json(*group.fibers);
    if (group.values) json["values"] = to_json(*group.values);
    all.push_back(std::move(json));
  }
  return all;
}

// Reads what to_json has written; the first fault sticks.
class Reader {
 public:
  explicit Reader(std::string origin) : origin_(std::move(origin)) {}

  [[nodiscard]] Expected<Features> read(const Json& json) {
    JsonObject object(json, origin_);
    object.expect_format(kFormat);
    const bool has_format =
        json.is_object() && json.contains("format") && json["format"] == kFormat;
    if (!has_format) return object.finish().error();  // before those of what is absent, too
    Features features;
    features.sizes = sizes(json);
    features.names = names(json, features.sizes.size());
    for (const char* key : {"sizes", "names"}) object.ignore(key);
    features.entries = static_cast<std::uint64_t>(object.bytes("entries").value);
    features.density = object.number("density");
    const int order = static_cast<int>(features.sizes.size());
    if (json.is_object() && json.contains("modes")) {
      features.modes = groups(object, json, "modes", order);
    }
    features.fibers = groups(object, json, "fibers", order);
    features.slices = groups(object, json, "slices", order);
    if (std::optional<JsonObject> values = object.object("values")) {
      features.values = distribution(*values);
    }
    if (std::optional<JsonObject> along = object.object("along")) {
      const std::int64_t mode = along->integer("mode");
      const bool is_mode = mode >= 1 && mode <= order;
      if (!is_mode) along->fail("mode", fmt::format("is {}, wanted a mode, 1 to {}", mode, order));
      features.along = Persistence{.mode = is_mode ? static_cast<int>(mode) - 1 : 0,
                                   .autocorrelation = along->number("autocorrelation")};
      const std::int64_t half_life = along->integer("half_life", 0);
      if (half_life > 0) features.along->half_life = half_life;
      keep(along->finish());
    }
    if (std::optional<JsonObject> uneven = object.object("uneven")) {
      features.uneven = Unevenness{.steps = numbers(json["uneven"], "steps", kMaxStepParts),
                                   .rows = numbers(json["uneven"], "rows", kMaxRowParts)};
      for (const char* key : {"steps", "rows"}) uneven->ignore(key);
      keep(uneven->finish());
    }
    keep(object.finish());
    if (fault_) return *fault_;
    return features;
  }

 private:
  void keep(const Expected<void>& read) {
    if (!read && !fault_) fault_ = read.error();
  }
  void fail(std::string_view pointer, std::string_view what) {
    if (!fault_)
      fault_ = Error{ErrorCode::kBadInput, fmt::format("{}: {} {}", origin_, pointer, what)};
  }

  std::vector<std::uint64_t> sizes(const Json& json) {
    std::vector<std::uint64_t> all;
    const auto found = json.is_object() ? json.find("sizes") : json.end();
    const bool is_list = found != json.end() && found->is_array() && !found->empty() &&
                         found->size() <= static_cast<std::size_t>(kMaxOrder);
    if (is_list) {
      for (const Json& size : *found) {
        if (!size.is_number_integer() || size.get<double>() < 1 ||
            size.get<double>() > static_cast<double>(kMaxSize)) {
          break;
        }
        all.push_back(size.get<std::uint64_t>());
      }
    }
    if (!is_list || all.size() != found->size()) {
      fail("/sizes", fmt::format("is no list of 1 to {} sizes from 1 to {}", kMaxOrder, kMaxSize));
      all.assign(1, 1);
    }
    return all;
  }

  std::vector<std::string> names(const Json& json, std::size_t order) {
    std::vector<std::string> all;
    const auto found = json.is_object() ? json.find("names") : json.end();
    if (found == json.end()) return all;
    if (found->is_array()) {
      for (const Json& name : *found) {
        if (name.is_string()) all.push_back(name.get<std::string>());
      }
    }
    if (all.size() != order) fail("/names", "is no list of a name for each mode");
    return all;
  }

  std::vector<double> numbers(const Json& uneven, const char* key, std::size_t most) {
    std::vector<double> all;
    const auto found = uneven.find(key);
    const bool is_list =
        found != uneven.end() && found->is_array() && !found->empty() && found->size() <= most;
    if (is_list) {
      for (const Json& number : *found) {
        if (number.is_number() && number.get<double>() >= 0 && std::isfinite(number.get<double>()))
          all.push_back(number.get<double>());
      }
    }
    if (!is_list || all.size() != found->size()) {
      fail(fmt::format("/uneven/{}", key),
           fmt::format("is no list of 1 to {} numbers of at least 0", most));
    }
    return all;
  }

  Spread spread(JsonObject& parent, const std::string& key) {
    std::optional<JsonObject> object = parent.object(key);
    if (!object) {
      parent.fail(key, "is missing");
      return {};
    }
    const Spread spread{.min = object->number("min"),
                        .mean = object->number("mean"),
                        .std = object->number("std"),
                        .cv = object->number("cv"),
                        .imbalance = object->number("imbalance")};
    keep(object->finish());
    return spread;
  }

  Distribution distribution(JsonObject& object) {
    Distribution read;
    read.groups = object.number("groups");
    read.nonempty = static_cast<std::uint64_t>(object.bytes("nonempty").value);
    read.sum = object.number("sum");
    read.max = object.number("max");
    read.all = spread(object, "all");
    read.of_nonempty = spread(object, "of_nonempty");
    keep(object.finish());
    return read;
  }

  std::vector<GroupFeatures> groups(JsonObject& parent, const Json& json, const std::string& key,
                                    int order) {
    std::vector<GroupFeatures> all;
    std::size_t index = 0;
    for (JsonObject& object : parent.objects(key)) {
      GroupFeatures group;
      group.free = free_modes(json[key][index], fmt::format("/{}/{}/free", key, index), order);
      object.ignore("free");
      ++index;
      if (auto entries = object.object("entries")) {
        group.entries = distribution(*entries);
      } else {
        object.fail("entries", "is missing");
      }
      if (auto fibers = object.object("fibers")) group.fibers = distribution(*fibers);
      if (auto values = object.object("values")) group.values = distribution(*values);
      keep(object.finish());
      all.push_back(std::move(group));
    }
    return all;
  }

  std::vector<int> free_modes(const Json& group, std::string_view pointer, int order) {
    std::vector<int> free;
    const auto found = group.is_object() ? group.find("free") : group.end();
    if (found != group.end() && found->is_array()) {
      for (const Json& mode : *found) {
        if (!mode.is_number_integer() || mode.get<double>() < 1 || mode.get<double>() > order) {
          free.clear();
          break;
        }
        free.push_back(mode.get<int>() - 1);
      }
    }
    if (free.empty()) fail(pointer, "is no list of modes of the tensor");
    return free;
  }

  std::string origin_;
  std::optional<Error> fault_;
};

}  // namespace

Json to_json(const Features& features) {
  Json json = {{"format", kFormat}, {"sizes", features.sizes}};
  if (!features.names.empty()) json["names"] = features.names;
  json["entries"] = features.entries;
  json["density"] = features.density;
  if (!features.modes.empty()) json["modes"] = to_json(features.modes);
  if (features.values) json["values"] = to_json(*features.values);
  json["fibers"] = to_json(features.fibers);
  json["slices"] = to_json(features.slices);
  if (features.along) {
    json["along"] = {{"mode", features.along->mode + 1},
                     {"autocorrelation", features.along->autocorrelation}};
    if (features.along->half_life) json["along"]["half_life"] = *features.along->half_life;
  }
  if (features.uneven) {
    json["uneven"] = {{"steps", features.uneven->steps}, {"rows", features.uneven->rows}};
  }
  return json;
}

Expected<Features> parse_features(const Json& json, const std::string& origin) {
  return Reader(origin).read(json);
}

}  // namespace dynmo::tensor
