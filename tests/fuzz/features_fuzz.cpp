// SPDX-License-Identifier: Apache-2.0
// Features that are taken read back as they were written, and what is generated like them is as
// asked or refused.
#include <algorithm>

#include "dynmo/core/json.h"
#include "dynmo/tensor/features.h"
#include "dynmo/tensor/generate.h"
#include "dynmo/tensor/sparse_tensor.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {
namespace {

constexpr std::uint64_t kMaxEntries = 200;  // that are worth the time
constexpr std::size_t kMaxBytes = 6000;     // the seeds have less

Expected<std::string> generated(const tensor::Request& request) {
  std::string text;
  DYNMO_TRY(tensor::generate(request, [&](std::string_view piece) -> Expected<void> {
    text += piece;
    return {};
  }));
  return text;
}

}  // namespace

Outcome run_target(std::string_view text) {
  if (text.size() > kMaxBytes) return Outcome::kRefused;
  const auto json = parse_json(text, "features.json");
  if (!json) return refused(json.error());
  const auto features = tensor::parse_features(*json, "features.json");
  if (!features) return refused(features.error());
  const Json written = tensor::to_json(*features);
  const auto again = tensor::parse_features(written, "features.json");
  DYNMO_CHECK(again.has_value() && tensor::to_json(*again) == written, "the same again");
  const auto request = tensor::request_like(*features);
  if (!request) return refused(request.error());
  if (std::max({request->entries, request->fibers, request->slices}) > kMaxEntries) {
    return Outcome::kTaken;
  }
  if (std::ranges::any_of(request->sizes, [](std::uint64_t size) { return size > kMaxEntries; })) {
    return Outcome::kTaken;
  }
  const auto made = generated(*request);
  if (!made) return refused(made.error());
  const auto read = tensor::parse_coordinates(*made, "made.tns");
  DYNMO_CHECK(read.has_value() && read->entries() == request->entries, "{} entries",
              request->entries);
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  std::vector<std::string> all;
  for (const char* text : {"1 2 3 0.5\n4 5 6 1\n1 1 1 2\n1 1 2 2\n", "9 9\n1 1 1\n9 9 1\n9 8 1\n",
                           "1 2 0.5\n4 5 1\n1 1 2\n"}) {
    const auto tensor = tensor::parse_coordinates(text, "a.tns", tensor::Values::kKept);
    all.push_back(tensor::to_json(*tensor::features_of(*tensor, {.along = 0})).dump());
  }
  return all;
}

}  // namespace dynmo::fuzz
