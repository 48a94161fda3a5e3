// SPDX-License-Identifier: Apache-2.0
// Coordinates that are taken lie inside the sizes, and have features of as many entries, the same
// numbers of them with values as without, where entries are counted in another way.
#include "dynmo/tensor/coordinates.h"
#include "dynmo/tensor/features.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {
namespace {

Json without_values(Json features) {
  features.erase("values");
  for (const char* list : {"fibers", "slices", "modes"}) {
    if (!features.contains(list)) continue;
    for (Json& group : features[list]) group.erase("values");
  }
  return features;
}

}  // namespace

Outcome run_target(std::string_view text) {
  const auto read = tensor::parse_coordinates(text, "a.tns", tensor::Values::kKept);
  const auto dropped = tensor::parse_coordinates(text, "a.tns", tensor::Values::kDropped);
  DYNMO_CHECK(dropped.has_value() == read.has_value(), "the same answer without values");
  if (!read) return refused(read.error());
  DYNMO_CHECK(read->values.size() == read->entries(), "a value an entry");
  for (std::size_t mode = 0; mode < read->sizes.size(); ++mode) {
    DYNMO_CHECK(read->indices[mode].size() == read->entries(), "an index of each mode an entry");
    for (const std::uint32_t index : read->indices[mode]) {
      DYNMO_CHECK(index < read->sizes[mode], "index {} below {}", index, read->sizes[mode]);
    }
  }
  const auto features = tensor::features_of(*read);
  if (!features) return refused(features.error());
  const auto counted = tensor::features_of(*dropped);
  DYNMO_CHECK(counted.has_value(), "features without values, got {}", counted.error().message);
  DYNMO_CHECK(tensor::to_json(*counted) == without_values(tensor::to_json(*features)),
              "the same counts without values");
  const auto again = tensor::parse_features(tensor::to_json(*features), "features.json");
  DYNMO_CHECK(again.has_value(), "features that read back");
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  return {"# a comment\n3\n4 5 6\n1 2 3 0.5\n4 5 6 1\n", "1 2 3 0.5\n4 5 6 1\n1 1 1 -2e3\n",
          "9 9\n1 1 1\n9 9 1\n", "7 0.5\n1 2\n"};
}

}  // namespace dynmo::fuzz
