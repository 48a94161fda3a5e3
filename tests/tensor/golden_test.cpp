// SPDX-License-Identifier: Apache-2.0
#include "tests/support/golden.h"

#include "dynmo/tensor/features.h"

namespace dynmo::tensor {
namespace {

TEST(TensorGoldens, FeaturesAreWrittenAsTheyWereRead) {
  for (const char* name : {"tensor/goldens/features.json", "tensor/goldens/plain_features.json"}) {
    expect_rewritten(name, [](const Json& json) -> Expected<Json> {
      DYNMO_ASSIGN(const Features features, parse_features(json, "golden"));
      return to_json(features);
    });
  }
}

TEST(TensorGoldens, RefusalsStayTheSame) {
  expect_refusals("tensor/goldens/features.json", [](const std::string& text) -> Expected<void> {
    DYNMO_TRY(parse_features(Json::parse(text), "golden"));
    return {};
  });
}

}  // namespace
}  // namespace dynmo::tensor
