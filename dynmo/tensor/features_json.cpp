// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/core/fields.h"
#include "dynmo/tensor/features.h"

namespace dynmo::tensor {
namespace {

constexpr std::string_view kFormat = "dynmo-features-1";
constexpr std::string_view kNoModes = "is no list of modes of the tensor";
constexpr Limits kSize{.min = 1, .max = static_cast<double>(kMaxSize)};
constexpr Limits kMode{.min = 1, .max = kMaxOrder};

std::vector<int> plus(int number, std::vector<int> modes) {
  for (int& mode : modes) mode += number;
  return modes;
}

// Returns the elements that are texts.
std::vector<std::string> texts_of(const Json& list) {
  std::vector<std::string> texts;
  for (const Json& each : list) {
    if (each.is_string()) texts.push_back(each.get<std::string>());
  }
  return texts;
}

template <typename T>
constexpr bool kReads = !std::is_const_v<std::remove_reference_t<T>>;

Bytes bytes_of(std::uint64_t count) { return Bytes(static_cast<std::int64_t>(count)); }
Expected<std::uint64_t> count_of_bytes(Bytes bytes) {
  return static_cast<std::uint64_t>(bytes.value);
}

void list_shares(const char* key, auto& shares, std::size_t most, auto& visit) {
  visit.numbers(key, shares, most, kCount,
                fmt::format("is no list of 1 to {} numbers of at least 0", most));
}

}  // namespace

void list_fields(IsA<Spread> auto& spread, auto& visit) {
  visit("min", spread.min);
  visit("mean", spread.mean);
  visit("std", spread.std);
  visit("cv", spread.cv);
  visit("imbalance", spread.imbalance);
}

void list_fields(IsA<Distribution> auto& distribution, auto& visit) {
  visit.number("groups", distribution.groups);
  visit.mapped("nonempty", distribution.nonempty, bytes_of, count_of_bytes);
  visit.number("sum", distribution.sum);
  visit.number("max", distribution.max);
  visit("all", distribution.all);
  visit("of_nonempty", distribution.of_nonempty);
}

// Lists the fields of a group's features. In a file, modes count from 1.
void list_fields(IsA<GroupFeatures> auto& group, auto& visit) {
  std::vector<int> free = plus(1, group.free);
  visit.numbers("free", free, std::numeric_limits<std::size_t>::max(), kMode, kNoModes);
  if constexpr (kReads<decltype(group)>) group.free = plus(-1, std::move(free));
  visit("entries", group.entries);
  visit("fibers", group.fibers);
  visit("values", group.values);
}

void list_fields(IsA<Persistence> auto& along, auto& visit) {
  visit.mapped(
      "mode", along.mode, [](int mode) { return std::int64_t{mode} + 1; },
      [](std::int64_t mode) -> Expected<int> {
        return static_cast<int>(std::clamp<std::int64_t>(mode, 0, kMaxOrder + 1)) - 1;
      });
  visit("autocorrelation", along.autocorrelation);
  visit("half_life", along.half_life);
}

void list_fields(IsA<Unevenness> auto& uneven, auto& visit) {
  list_shares("steps", uneven.steps, kMaxStepParts, visit);
  list_shares("rows", uneven.rows, kMaxRowParts, visit);
}

void list_fields(IsA<Features> auto& features, auto& visit) {
  visit.format(kFormat);
  visit.numbers("sizes", features.sizes, static_cast<std::size_t>(kMaxOrder), kSize,
                fmt::format("is no list of 1 to {} sizes from 1 to {}", kMaxOrder, kMaxSize));
  Json names = features.names.empty() ? Json() : Json(features.names);
  visit.any("names", names);
  if constexpr (kReads<decltype(features)>) features.names = texts_of(names);
  visit.mapped("entries", features.entries, bytes_of, count_of_bytes);
  visit("density", features.density);
  visit.unless_empty("modes", features.modes);
  visit("values", features.values);
  visit("fibers", features.fibers);
  visit("slices", features.slices);
  visit("along", features.along);
  visit("uneven", features.uneven);
}
void check_fields(const IsA<Features> auto& features, JsonObject& object) {
  const int order = static_cast<int>(features.sizes.size());
  if (object.value("names") != nullptr && std::ssize(features.names) != order) {
    object.fail("names", "is no list of a name for each mode");
  }
  for (const auto& [key, groups] :
       {std::pair("modes", &features.modes), std::pair("fibers", &features.fibers),
        std::pair("slices", &features.slices)}) {
    for (std::size_t i = 0; i < groups->size(); ++i) {
      const auto is_mode = [&](int mode) { return mode < order; };
      if (std::ranges::all_of((*groups)[i].free, is_mode)) continue;
      object.fail(fmt::format("{}/{}/free", key, i), kNoModes);
    }
  }
  const Json* along = object.value("along");  // nullptr after a fault
  if (along != nullptr && (features.along->mode < 0 || features.along->mode >= order)) {
    object.fail("along/mode",
                fmt::format("is {}, wanted a mode, 1 to {}", along->at("mode").dump(), order));
  }
}

Json to_json(const Features& features) { return write_list(features); }

Expected<Features> parse_features(const Json& json, const std::string& origin) {
  DYNMO_ASSIGN(Features features, parse_fields<Features>(json, origin));
  if (features.along && features.along->half_life.value_or(1) < 1)
    features.along->half_life.reset();
  return features;
}

}  // namespace dynmo::tensor
