// SPDX-License-Identifier: Apache-2.0
#pragma once

// Profile ("dynmo-profile-1") and cluster ("dynmo-cluster-1") files, JSON as in docs/formats.md.

#include <filesystem>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"

namespace dynmo::cost {

// Reads the costs of a profile. Returns kBadInput with file and JSON pointer for a missing or
// unknown key, NaN, a negative value, or no layers.
[[nodiscard]] Expected<ModelCost> parse_profile(const Json& json, std::string_view origin);
[[nodiscard]] Expected<ModelCost> read_profile(const std::filesystem::path& path);
[[nodiscard]] Json profile_json(const ModelCost& model);

[[nodiscard]] Expected<Cluster> parse_cluster(const Json& json, std::string_view origin);
[[nodiscard]] Expected<Cluster> read_cluster(const std::filesystem::path& path);
[[nodiscard]] Json cluster_json(const Cluster& cluster);

}  // namespace dynmo::cost
