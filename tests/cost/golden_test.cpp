// SPDX-License-Identifier: Apache-2.0
#include "tests/support/golden.h"

#include "dynmo/cost/files.h"

namespace dynmo::cost {
namespace {

TEST(CostGoldens, AProfileIsWrittenAsItWasRead) {
  expect_rewritten("cost/goldens/profile.json", [](const Json& json) -> Expected<Json> {
    DYNMO_ASSIGN(const ModelCost model, parse_profile(json, "golden"));
    return profile_json(model);
  });
}

TEST(CostGoldens, AClusterIsWrittenAsItWasRead) {
  for (const char* name : {"cost/goldens/cluster.json", "cost/goldens/equal_cluster.json"}) {
    expect_rewritten(name, [](const Json& json) -> Expected<Json> {
      DYNMO_ASSIGN(const Cluster cluster, parse_cluster(json, "golden"));
      return cluster_json(cluster);
    });
  }
}

}  // namespace
}  // namespace dynmo::cost
