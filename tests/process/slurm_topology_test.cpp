// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/process/rank_environment.h"

namespace dynmo::process {
namespace {

Expected<std::string> read(std::optional<std::string> address, std::optional<std::string> pattern) {
  return switches_of_host([&](const char* name) -> const char* {
    if (std::strcmp(name, "SLURM_TOPOLOGY_ADDR") == 0) return address ? address->c_str() : nullptr;
    if (std::strcmp(name, "SLURM_TOPOLOGY_ADDR_PATTERN") != 0) return nullptr;
    return pattern ? pattern->c_str() : nullptr;
  });
}

// Clusters have these: no topology; switches of two and three levels, where the network has no
// common top; a host on two switches; blocks; a host whose name has a dot.
TEST(SlurmTopology, ReadsWhatSlurmSays) {
  const struct {
    const char* address;
    const char* pattern;
    const char* switches;
  } cases[] = {
      {"pp208", "node", ""},
      {"localhost.localdomain", "node", ""},
      {"sh04.sh04-isw-16.sh04-16n05", "switch.switch.node", "sh04.sh04-isw-16"},
      {".ib-core.tors-r1pac16.gpu027", "switch.switch.switch.node", ".ib-core.tors-r1pac16"},
      {"s0.s[4-5].tux1", "switch.switch.node", "s0.s[4-5]"},
      {"b8.tux1", "block.node", "b8"},
      {"s0.tux1.cluster.example", "switch.node", "s0"},
      {"t:1:0:2.tux1", "torus:x:y:z.node", "t:1:0:2"},
  };
  for (const auto& one : cases) {
    const auto found = read(one.address, one.pattern);
    ASSERT_TRUE(found.has_value()) << one.address << ": " << found.error().message;
    EXPECT_EQ(*found, one.switches) << one.address;
  }
  EXPECT_EQ(*read(std::nullopt, std::nullopt), "");
  EXPECT_EQ(*read("", ""), "");
}

// The oracle makes the address from its parts.
TEST(SlurmTopology, SwitchesAreThePartsBeforeTheHost) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Rng rng(mix_key({0x70B01, seed}));
    const auto word = [&](bool dots) {
      std::string text;
      for (std::uint64_t left = rng.below(6); left > 0; --left) {
        text += dots && rng.below(3) == 0 ? '.' : "abs019-[]"[rng.below(9)];
      }
      return text;
    };
    std::string switches;
    std::string pattern;
    const std::uint64_t levels = rng.below(4);
    for (std::uint64_t level = 0; level < levels; ++level) {
      switches += (level > 0 ? "." : "") + word(/*dots=*/false);
      pattern += rng.below(2) == 0 ? "switch." : "block.";
    }
    const std::string host = "h" + word(/*dots=*/true);
    const std::string address = levels > 0 ? fmt::format("{}.{}", switches, host) : host;
    const auto found = read(address, pattern + "node");
    ASSERT_TRUE(found.has_value()) << "seed " << seed << ": " << found.error().message;
    EXPECT_EQ(*found, switches) << "seed " << seed << ", " << address;
  }
}

TEST(SlurmTopology, RefusesWhatDoesNotFit) {
  const std::string parts = ", wanted a part of the address for each of the pattern";
  const std::string end = ", wanted a pattern that ends in 'node'";
  const auto refusal = [](std::optional<std::string> address, std::optional<std::string> pattern) {
    const auto found = read(std::move(address), std::move(pattern));
    EXPECT_FALSE(found.has_value());
    return found.has_value() ? std::string() : found.error().message;
  };
  EXPECT_EQ(refusal("tux1", "switch.node"),
            "SLURM_TOPOLOGY_ADDR='tux1' with SLURM_TOPOLOGY_ADDR_PATTERN='switch.node'" + parts);
  EXPECT_TRUE(refusal("s0.s1.tux1", "switch.switch.switch.node").ends_with(parts));
  EXPECT_TRUE(refusal("s0.", "switch.node").ends_with(parts));
  EXPECT_TRUE(refusal(std::nullopt, "node").ends_with(parts));
  EXPECT_TRUE(refusal("s0.tux1", std::nullopt).ends_with(end));
  EXPECT_TRUE(refusal("s0.tux1", "switch").ends_with(end));
  EXPECT_TRUE(refusal("s0.tux1", "switchnode").ends_with(end));
  EXPECT_NE(refusal(std::string(5000, 's'), "node").find("5000 and 4 bytes, wanted at most 4096"),
            std::string::npos);
}

}  // namespace
}  // namespace dynmo::process
