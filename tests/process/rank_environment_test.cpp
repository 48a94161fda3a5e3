// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/rank_environment.h"

#include <gtest/gtest.h>

#include <map>

namespace dynmo::process {
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

// The variables of sbatch's script and `srun --pty bash`, with the address exported for an srun to
// come.
TEST(RankEnvironment, IsAbsentWhereNobodyStartedARank) {
  const Variables batch = {{"SLURM_JOB_ID", "7"},
                           {"SLURM_PROCID", "0"},
                           {"SLURM_NTASKS", "4"},
                           {"SLURM_LOCALID", "0"},
                           {"SLURM_JOB_NODELIST", "n[1-2]"}};
  Variables exported = batch;
  exported["MASTER_ADDR"] = "n1";
  Variables shell = batch;
  shell["SLURM_STEP_NUM_TASKS"] = "1";
  shell["SLURM_STEP_ID"] = "0";
  for (const Variables& variables : {Variables{{"HOME", "/"}}, batch, exported, shell}) {
    const auto none = read(variables);
    ASSERT_TRUE(none);
    EXPECT_FALSE(none->has_value());
  }
}

// A launcher that was asked for one process: `mpirun -n 1`, `mpiexec -n 1`, a step of one task by
// any of srun's plugins, within an allocation of more or not.
TEST(RankEnvironment, IsAbsentWhereALauncherHasStartedOneProcess) {
  const Variables step = {{"SLURM_JOB_ID", "7"},         {"SLURM_STEP_ID", "0"},
                          {"SLURM_PROCID", "0"},         {"SLURM_STEP_NUM_TASKS", "1"},
                          {"SLURM_STEP_NUM_NODES", "1"}, {"SLURM_STEP_NODELIST", "n1"}};
  // mpirun starts its daemons by a step of its own.
  const Variables daemons = {{"SLURM_JOB_ID", "7"},
                             {"SLURM_STEP_ID", "1"},
                             {"SLURM_PROCID", "3"},
                             {"SLURM_STEP_NUM_TASKS", "9"},
                             {"SLURM_STEP_NODELIST", "n[1-9]"}};
  const Variables ompi = {{"OMPI_COMM_WORLD_RANK", "0"},       {"OMPI_COMM_WORLD_SIZE", "1"},
                          {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                          {"PMIX_NAMESPACE", "54198273"},      {"PMIX_RANK", "0"}};
  const Variables pmi = {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}, {"PMI_JOBID", "7.0"}};
  const Variables intel = {
      {"PMI_RANK", "0"}, {"PMI_SIZE", "1"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "1"}};
  const Variables pmix = {{"PMIX_NAMESPACE", "slurm.pmix.7.0"}, {"PMIX_RANK", "0"}};
  const auto both = [](Variables a, const Variables& b) {
    a.insert(b.begin(), b.end());
    return a;
  };
  const std::map<std::string, Variables> cases = {
      {"mpirun", ompi},
      {"mpirun within a job of nine hosts", both(ompi, daemons)},
      {"mpiexec", pmi},
      {"mpiexec within a job of nine hosts", both(pmi, daemons)},
      {"mpiexec of Intel MPI", intel},
      {"srun", step},
      {"srun --mpi=pmi2", both(pmi, step)},
      {"srun --mpi=pmix", both(pmix, step)}};
  for (const auto& [launcher, variables] : cases) {
    for (const Variables& place : {Variables{}, {{"MASTER_ADDR", "n1"}, {"MASTER_PORT", "1"}}}) {
      const auto none = read(both(variables, place));
      ASSERT_TRUE(none) << launcher << ": " << none.error().message;
      EXPECT_FALSE(none->has_value()) << launcher;
    }
  }
}

TEST(RankEnvironment, OneRankByTorchrunsNamesIsARankThatOthersMayJoin) {
  for (const Variables& more : {Variables{}, Variables{{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}}) {
    Variables variables = {
        {"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "n1"}, {"MASTER_PORT", "29500"}};
    variables.insert(more.begin(), more.end());
    const auto found = read(variables);
    ASSERT_TRUE(found) << found.error().message;
    ASSERT_TRUE(found->has_value());
    EXPECT_EQ((*found)->size, 1);
  }
}

TEST(RankEnvironment, ReadsTorchrunsNames) {
  const auto found = read(kTorchrun);
  ASSERT_TRUE(found);
  const RankEnvironment& environment = **found;
  EXPECT_EQ(environment.rank, WorldRank(2));
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
                                            {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}}) {
    const auto found = read({{rank, "1"}, {size, "3"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}});
    ASSERT_TRUE(found) << rank;
    EXPECT_EQ((*found)->rank, WorldRank(1));
    EXPECT_EQ((*found)->size, 3);
  }
}

// As mpirun of Open MPI 4.1 sets them, on one host and on two.
TEST(RankEnvironment, ReadsMpiruns) {
  Variables variables = {{"OMPI_COMM_WORLD_RANK", "3"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                         {"PMIX_NAMESPACE", "54198273"}};
  const auto here = read(variables);
  ASSERT_TRUE(here) << here.error().message;
  EXPECT_EQ((*here)->rank, WorldRank(3));
  EXPECT_EQ((*here)->local_rank, 3);
  EXPECT_EQ((*here)->address, "127.0.0.1");
  const int port = (*here)->port;
  EXPECT_GE(port, 15000);
  EXPECT_LT(port, 30000);
  variables["PMIX_NAMESPACE"] = "54198274";
  EXPECT_NE((*read(variables))->port, port);

  variables["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  const auto nowhere = read(variables);
  ASSERT_FALSE(nowhere);
  EXPECT_EQ(nowhere.error().code, ErrorCode::kBadInput);
  EXPECT_NE(nowhere.error().message.find("mpirun -x MASTER_ADDR=HOST"), std::string::npos);
  variables["MASTER_ADDR"] = "node1";
  EXPECT_EQ((*read(variables))->address, "node1");
  variables.erase("MASTER_ADDR");
  variables["SLURM_JOB_NODELIST"] = "big[3,7]";
  // mpirun's daemons have these variables, which it starts by srun.
  variables["SLURM_PROCID"] = "0";
  variables["SLURM_STEP_NUM_TASKS"] = "9";
  variables["SLURM_STEP_NODELIST"] = "big7";
  EXPECT_EQ((*read(variables))->address, "big3");
  EXPECT_EQ((*read(variables))->size, 4);
}

// As srun of Slurm 22.05 sets them.
TEST(RankEnvironment, ReadsSruns) {
  Variables variables = {{"SLURM_PROCID", "5"},         {"SLURM_LOCALID", "1"},
                         {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_NTASKS", "16"},
                         {"SLURM_JOB_ID", "77"},        {"SLURM_STEP_NODELIST", "gpu[08-09]"},
                         {"SLURM_STEP_ID", "0"},        {"SLURM_STEP_NUM_NODES", "2"}};
  const auto found = read(variables);
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ((*found)->rank, WorldRank(5));
  EXPECT_EQ((*found)->size, 8);
  EXPECT_EQ((*found)->local_rank, 1);
  EXPECT_EQ((*found)->address, "gpu08");
  const int port = (*found)->port;
  variables["SLURM_PROCID"] = "0";
  EXPECT_EQ((*read(variables))->port, port);
  variables["SLURM_STEP_ID"] = "1";  // another srun of the same job
  EXPECT_NE((*read(variables))->port, port);
  variables["MASTER_PORT"] = "1234";
  EXPECT_EQ((*read(variables))->port, 1234);
  for (const auto& [list, first] : Variables{{"a", "a"},
                                             {"a,b", "a"},
                                             {"a[1-3]", "a1"},
                                             {"a[007,9-12],b", "a007"},
                                             {"a[1-3].site,b", "a1.site"}}) {
    variables["SLURM_STEP_NODELIST"] = list;
    EXPECT_EQ((*read(variables))->address, first);
  }
  variables["SLURM_STEP_NUM_NODES"] = "1";
  EXPECT_EQ((*read(variables))->address, "127.0.0.1");
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
}  // namespace dynmo::process
