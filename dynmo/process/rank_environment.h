// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rank this process is, as whoever started it says in the environment: our launcher,
// torchrun, mpirun, srun, a Kubernetes job (docs/clusters.md).

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"

namespace dynmo::process {

// Where the store through which the ranks find each other is.
enum class StoreHost {
  kRank0,      // rank 0 opens it
  kElsewhere,  // it is open already, such as that of torchrun's agent
};

struct RankEnvironment {
  WorldRank rank;
  int size = 1;
  int local_rank = 0;  // among the ranks of this host
  std::string address = "127.0.0.1";
  std::uint16_t port = 29500;
  StoreHost store_host = StoreHost::kRank0;
  std::optional<int> store_fd = {};  // rank 0: a listening socket on address and port, to be taken
  std::string attempt = {};          // tells restarts that share one store apart
};

using GetVariable = std::function<const char*(const char*)>;

// The first of these that is there says rank and size: RANK, WORLD_SIZE, LOCAL_RANK (torchrun, our
// launcher, a Kubernetes job), OMPI_COMM_WORLD_* (Open MPI), PMI_* (MPICH, Intel MPI), SLURM_* of a
// step of several tasks (srun; a batch script and a step of one task are no ranks: from there ranks
// are started as from a shell).
//
// Where the ranks find each other is MASTER_ADDR and MASTER_PORT, which torchrun's names require.
// Other launchers need not give them. Address: 127.0.0.1 where all ranks are on one host, else the
// first host of Slurm's allocation, on which rank 0 runs unless the user has asked for another
// distribution. Port: 15000 to 29999 from the id of the job, so that jobs that share a host differ.
//
// nullopt if nobody has started this process as a rank. kBadInput, naming the variable, if one is
// missing or out of range.
[[nodiscard]] Expected<std::optional<RankEnvironment>> rank_environment();
[[nodiscard]] Expected<std::optional<RankEnvironment>> rank_environment(const GetVariable& get);

}  // namespace dynmo::process
