// SPDX-License-Identifier: Apache-2.0
// Coordinates that are taken lie inside the sizes, and have features of as many entries, the same
// numbers of them with values as without, where entries are counted in another way.
#include "dynmo/tensor/features.h"
#include "dynmo/tensor/sparse_tensor.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {
namespace {

constexpr std::size_t kMaxModes = 3;     // whose features are worth the time
constexpr std::size_t kMaxEntries = 16;  // of an input that others are made from
constexpr std::size_t kMaxBytes = 512;

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
  text = text.substr(0, kMaxBytes);
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
  if (read->sizes.size() > kMaxModes || read->entries() > kMaxEntries) return Outcome::kRefused;
  const auto features = tensor::features_of(*read);
  if (!features) return refused(features.error());
  const auto counted = tensor::features_of(*dropped);
  DYNMO_CHECK(counted.has_value(), "features without values, got {}", counted.error().message);
  Json written = tensor::to_json(*features);
  const auto again = tensor::parse_features(written, "features.json");
  DYNMO_CHECK(again.has_value(), "features that read back");
  DYNMO_CHECK(tensor::to_json(*counted) == without_values(std::move(written)),
              "the same counts without values");
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  return {"# a comment\n3\n4 5 6\n1 2 3 0.5\n4 5 6 1\n", "1 2 3 0.5\n4 5 6 1\n1 1 1 -2e3\n",
          "9 9\n1 1 1\n9 9 1\n", "7 0.5\n1 2\n"};
}

}  // namespace dynmo::fuzz
