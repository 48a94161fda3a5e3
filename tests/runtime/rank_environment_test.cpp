// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/rank_environment.h"

#include <gtest/gtest.h>

#include <map>

namespace dynmo::runtime {
namespace {

using Variables = std::map<std::string, std::string>;

Expected<std::optional<RankEnvironment>> read(const Variables& variables) {
  return rank_environment([&variables](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

const Variables kTorchrun = {{"RANK", "2"},
                             {"LOCAL_RANK", "0"},
                             {"WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "node1"},
                             {"MASTER_PORT", "29400"}};

TEST(RankEnvironment, IsAbsentWhereNobodyStartedARank) {
  const auto none = read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"HOME", "/"}});
  ASSERT_TRUE(none);
  EXPECT_FALSE(none->has_value());
}

TEST(RankEnvironment, ReadsTorchrunsNames) {
  const auto found = read(kTorchrun);
  ASSERT_TRUE(found);
  const RankEnvironment& environment = **found;
  EXPECT_EQ(environment.rank, Rank(2));
  EXPECT_EQ(environment.size, 4);
  EXPECT_EQ(environment.local_rank, 0);
  EXPECT_EQ(environment.address, "node1");
  EXPECT_EQ(environment.port, 29400);
  EXPECT_EQ(environment.store_host, StoreHost::kRank0);
  EXPECT_FALSE(environment.store_fd);
}

TEST(RankEnvironment, KnowsTheStoreOfTorchrunsAgent) {
  Variables variables = kTorchrun;
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  variables["TORCHELASTIC_RESTART_COUNT"] = "3";
  const auto found = read(variables);
  ASSERT_TRUE(found);
  EXPECT_EQ((*found)->store_host, StoreHost::kElsewhere);
  EXPECT_EQ((*found)->attempt, "3");
}

TEST(RankEnvironment, TakesRankAndSizeOfOtherLaunchersWhereTheAddressIsGiven) {
  for (const auto& [rank, size] : Variables{{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                            {"PMI_RANK", "PMI_SIZE"},
                                            {"SLURM_PROCID", "SLURM_NTASKS"}}) {
    const auto found = read({{rank, "1"}, {size, "3"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}});
    ASSERT_TRUE(found) << rank;
    EXPECT_EQ((*found)->rank, Rank(1));
    EXPECT_EQ((*found)->size, 3);
  }
}

TEST(RankEnvironment, NamesWhatIsMissing) {
  const auto found = read({{"RANK", "1"}, {"MASTER_ADDR", "a"}});
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(found.error().message,
            "the environment has RANK, MASTER_ADDR but not WORLD_SIZE, MASTER_PORT: set all of "
            "them to join ranks that were started elsewhere, or none to start the ranks here");
}

TEST(RankEnvironment, NamesWhatIsOutOfRange) {
  const std::map<std::string, std::vector<std::string>> wrong = {
      {"RANK", {"4", "-1", "two", "1 ", "99999999999999"}},
      {"WORLD_SIZE", {"0", "2", "x"}},
      {"MASTER_PORT", {"0", "65536", "http"}},
      {"LOCAL_RANK", {"-1"}}};
  for (const auto& [name, values] : wrong) {
    for (const std::string& value : values) {
      Variables variables = kTorchrun;
      variables[name] = value;
      const auto found = read(variables);
      ASSERT_FALSE(found) << name << "=" << value;
      EXPECT_EQ(found.error().code, ErrorCode::kBadInput);
    }
  }
  Variables variables = kTorchrun;
  variables["RANK"] = "4";
  EXPECT_EQ(read(variables).error().message,
            "the environment has RANK='4', wanted a whole number from 0 to 3");
}

}  // namespace
}  // namespace dynmo::runtime
