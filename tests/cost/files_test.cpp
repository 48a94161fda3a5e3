// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>

#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"

namespace dynmo::cost {
namespace {

double awkward_double(Rng& rng) {  // any digit counts
  switch (rng.below(4)) {
    case 0:
      return 0;
    case 1:
      return std::numeric_limits<double>::denorm_min() * static_cast<double>(rng.below(1000));
    case 2:
      return rng.uniform() * 1e-9;
    default:
      return rng.uniform();
  }
}

ModelCost random_profile(std::uint64_t seed) {
  Rng rng(mix_key({0xF11E, seed}));
  ModelCost model;
  const auto layers = 1 + rng.below(6);
  const auto bytes = [&] { return Bytes{static_cast<std::int64_t>(rng.below(1ULL << 50))}; };
  for (std::uint64_t i = 0; i < layers; ++i) {
    LayerCost layer;
    layer.name = "blocks." + std::to_string(i) + ".\"\xC3\xA4\" ";
    layer.forward_s = awkward_double(rng);
    layer.backward_input_s = awkward_double(rng);
    layer.backward_weight_s = awkward_double(rng);
    layer.update_s = awkward_double(rng);
    layer.parameter_bytes = bytes();
    layer.gradient_bytes = bytes();
    layer.optimizer_bytes = bytes();
    layer.activation_bytes = bytes();
    layer.boundary_bytes = bytes();
    layer.frozen = rng.below(2) == 0;
    model.layers.push_back(layer);
  }
  return model;
}

Cluster random_cluster(std::uint64_t seed) {
  Rng rng(mix_key({0xC105, seed}));
  Cluster cluster = equal_ranks(1 + static_cast<int>(rng.below(5)));
  for (ClusterRank& rank : cluster.ranks) {
    rank.speed = 0.1 + rng.uniform();
    rank.node = static_cast<int>(rng.below(3));
    if (rng.below(2) == 0) rank.memory = Bytes{static_cast<std::int64_t>(rng.next() >> 1)};
  }
  cluster.inside_node.latency_s = awkward_double(rng);
  cluster.between_nodes.latency_s = awkward_double(rng);
  if (rng.below(2) == 0) cluster.between_nodes.bandwidth_bytes_per_s = 1 + rng.uniform() * 1e10;
  if (rng.below(2) == 0) {
    cluster.between_switches = Link{.latency_s = awkward_double(rng)};
    for (ClusterRank& rank : cluster.ranks) rank.network_switch = rank.node % 3;
  }
  if (rng.below(2) == 0) cluster.nic_bandwidth_bytes_per_s = 1 + rng.uniform() * 1e10;
  return cluster;
}

TEST(CostFiles, AProfileReadsBackExactly) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    const ModelCost model = random_profile(seed);
    const auto json = parse_json(profile_json(model).dump(), "p.json");
    ASSERT_TRUE(json);
    const auto read = parse_profile(*json, "p.json");
    ASSERT_TRUE(read) << read.error().message << ", seed " << seed;
    ASSERT_EQ(*read, model) << "seed " << seed;
  }
}

TEST(CostFiles, AClusterReadsBackExactly) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    const Cluster cluster = random_cluster(seed);
    const auto json = parse_json(cluster_json(cluster).dump(2), "c.json");
    ASSERT_TRUE(json);
    const auto read = parse_cluster(*json, "c.json");
    ASSERT_TRUE(read) << read.error().message << ", seed " << seed;
    ASSERT_EQ(*read, cluster) << "seed " << seed;
  }
}

std::string profile_error(std::string_view text) {
  const auto json = parse_json(text, "p.json");
  if (!json) return json.error().message;
  const auto read = parse_profile(*json, "p.json");
  return read ? "none" : read.error().message;
}

std::string layer_error(std::string_view fields) {
  return profile_error(R"({"format": "dynmo-profile-1", "layers": [{"forward_s": 1,
      "backward_input_s": 1, "backward_weight_s": 1, )" +
                       std::string(fields) + "}]}");
}

TEST(CostFiles, AbsentBytesAreZeroAndAbsentUpdateIsNone) {
  const auto json = parse_json(R"({"format": "dynmo-profile-1", "layers": [{"forward_s": 1,
      "backward_input_s": 2, "backward_weight_s": 3}]})",
                               "p.json");
  const auto model = parse_profile(*json, "p.json");
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(model->layers[0].optimizer_bytes, Bytes{0});
  EXPECT_EQ(model->layers[0].update_s, 0);
  EXPECT_FALSE(model->layers[0].frozen);
  EXPECT_EQ(model->layers[0].name, "layers.0");
}

TEST(CostFiles, ProfileFaultsNameTheirPlace) {
  EXPECT_EQ(layer_error(R"("update_s": -1)"),
            "p.json: /layers/0/update_s is -1, wanted seconds from 0 to 1000000");
  EXPECT_EQ(layer_error(R"("update_s": null)"),
            "p.json: /layers/0/update_s is null, wanted a finite number");
  EXPECT_EQ(layer_error(R"("paramter_bytes": 1)"),
            "p.json: /layers/0/paramter_bytes is not a known key, did you mean 'parameter_bytes'?");
  EXPECT_EQ(layer_error(R"("boundary_bytes": -2)"),
            "p.json: /layers/0/boundary_bytes is -2, wanted bytes, 0 or more");
  EXPECT_EQ(layer_error(R"("boundary_bytes": 1.5)"),
            "p.json: /layers/0/boundary_bytes is 1.5, wanted a whole number");
  EXPECT_EQ(layer_error(R"("boundary_bytes": 4611686018427387904)"),
            "p.json: /layers/0/boundary_bytes is 4611686018427387904, wanted at most "
            "1125899906842624");
  EXPECT_NE(layer_error(R"("update_s": 1e999)").find("p.json: wanted JSON"), std::string::npos);
  EXPECT_EQ(
      layer_error(R"("update_s": NaN)"),
      "p.json: /layers/0/update_s is NaN, which JSON does not have: wanted a finite number or "
      "null");
  EXPECT_EQ(profile_error(R"({"format": "dynmo-profile-1", "layers": []})"),
            "p.json: /layers has no elements, wanted at least one layer");
  EXPECT_EQ(profile_error(R"({"format": "dynmo-profile-1", "layers": [{"forward_s": 1}]})"),
            "p.json: /layers/0/backward_input_s is missing");
  EXPECT_EQ(profile_error(R"({"layers": [{}]})"), "p.json: /format is missing");
  EXPECT_EQ(profile_error(R"({"format": "dynmo-cluster-1", "layers": [{}]})"),
            "p.json: /format is 'dynmo-cluster-1', wanted 'dynmo-profile-1'");
  EXPECT_EQ(profile_error("[]"), "p.json: / is array, wanted an object");
}

TEST(CostFiles, ClusterFaultsNameTheirPlace) {
  const auto error = [](std::string_view text) {
    const auto json = parse_json(text, "c.json");
    const auto read = parse_cluster(*json, "c.json");
    return read ? "none" : read.error().message;
  };
  const std::string head = R"({"format": "dynmo-cluster-1", )";
  EXPECT_EQ(error(head + R"("ranks": []})"),
            "c.json: /ranks has no elements, wanted at least one rank");
  EXPECT_EQ(error(head + R"("ranks": [{}, {"speed": 0}]})"),
            "c.json: /ranks/1/speed is 0, wanted 1e-06 to 1000000");
  EXPECT_EQ(error(head + R"("ranks": [{"memory_bytes": -1}]})"),
            "c.json: /ranks/0/memory_bytes is -1, wanted bytes, 0 or more");
  EXPECT_EQ(error(head + R"("ranks": [{"node": -1}]})"),
            "c.json: /ranks/0/node is -1, wanted a node number, 0 or more");
  EXPECT_EQ(error(head + R"("ranks": [{}], "links": {"inside_node": {"latency": 1}}})"),
            "c.json: /links/inside_node/latency is not a known key, did you mean 'latency_s'?");
  EXPECT_EQ(error(head + R"("ranks": [{"switch": 2}, {"node": 1}, {"switch": 1}]})"),
            "c.json: /ranks/2/switch is 1, wanted 2 as of the ranks of node 0 before it");
  EXPECT_EQ(error(head + R"("ranks": [{"switch": -1}]})"),
            "c.json: /ranks/0/switch is -1, wanted a switch number, 0 or more");
  EXPECT_EQ(error(head +
                  R"("ranks": [{}], "links": {"between_switches": {"bandwidth_bytes_per_s": 0}}})"),
            "c.json: /links/between_switches/bandwidth_bytes_per_s is 0, wanted more than 0");
  EXPECT_EQ(
      error(head + R"("ranks": [{}], "links": {"between_nodes": {"bandwidth_bytes_per_s": 0}}})"),
      "c.json: /links/between_nodes/bandwidth_bytes_per_s is 0, wanted more than 0");
  EXPECT_EQ(error(head + R"("ranks": [{}], "links": {"nic_bandwidth_bytes_per_s": -1}})"),
            "c.json: /links/nic_bandwidth_bytes_per_s is -1, wanted more than 0");
  EXPECT_EQ(error(head + R"("ranks": [{}]})"), "none");
}

TEST(CostFiles, MissingFilesAreBadInput) {
  const auto path = std::filesystem::temp_directory_path() / "dynmo-no-such-profile.json";
  EXPECT_EQ(read_profile(path).error().code, ErrorCode::kBadInput);
  EXPECT_NE(read_cluster(path).error().message.find(path.string()), std::string::npos);
}

// A few thousand damaged files: every one is read or refused with one line, and what is read is
// valid.
TEST(CostFiles, DamagedFilesAreReadOrRefused) {
  int read = 0;
  for (std::uint64_t seed = 0; seed < 4000; ++seed) {
    Rng rng(mix_key({0xDA3A6ED, seed}));
    const bool profile = rng.below(2) == 0;
    std::string text = profile ? profile_json(random_profile(seed)).dump()
                               : cluster_json(random_cluster(seed)).dump();
    constexpr std::string_view kLikely = "0123456789-+.eE,:{}[]\"ntf";
    for (auto edits = 1 + rng.below(4); edits > 0; --edits) {
      const auto place = rng.below(text.size());
      const auto byte = rng.below(4) == 0 ? static_cast<char>(rng.below(256))
                                          : kLikely[rng.below(kLikely.size())];
      switch (rng.below(4)) {
        case 0:
          text.erase(place, 1 + rng.below(5));
          break;
        case 1:
          text.insert(place, 1, byte);
          break;
        default:
          text[place] = byte;
      }
      if (text.empty()) text = " ";
    }
    const auto json = parse_json(text, "damaged");
    if (!json) {
      ASSERT_EQ(json.error().code, ErrorCode::kBadInput);
      continue;
    }
    const auto model = parse_profile(*json, "damaged");
    const auto cluster = parse_cluster(*json, "damaged");
    ASSERT_FALSE(model && cluster);
    if (model) {
      ASSERT_TRUE(validate(*model)) << "seed " << seed << ": " << text;
    }
    if (cluster) {
      ASSERT_TRUE(validate(*cluster)) << "seed " << seed << ": " << text;
    }
    read += model || cluster ? 1 : 0;
  }
  EXPECT_GT(read, 100);
}

}  // namespace
}  // namespace dynmo::cost
