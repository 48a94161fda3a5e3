// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rank this process is, as whoever started it says in the environment: our launcher,
// torchrun, mpirun, srun, a Kubernetes job.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"

namespace dynmo::runtime {

// Where the store through which the ranks find each other is.
enum class StoreHost {
  kRank0,      // rank 0 opens it
  kElsewhere,  // it is open already, such as that of torchrun's agent
};

struct RankEnvironment {
  Rank rank;
  int size = 1;
  int local_rank = 0;  // among the ranks of this host
  std::string address = "127.0.0.1";
  std::uint16_t port = 29500;
  StoreHost store_host = StoreHost::kRank0;
  std::optional<int> store_fd = {};  // rank 0: a listening socket on address and port, to be taken
  std::string attempt = {};          // tells restarts that share one store apart
};

using GetVariable = std::function<const char*(const char*)>;

// Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, where given, LOCAL_RANK (torchrun's names).
// Where only the address is given, rank and size are taken from Open MPI's, PMI's or Slurm's
// variables. nullopt if none of the four is set: nobody has started this process as a rank.
// kBadInput, naming the variable, if one is missing or out of range.
[[nodiscard]] Expected<std::optional<RankEnvironment>> rank_environment();
[[nodiscard]] Expected<std::optional<RankEnvironment>> rank_environment(const GetVariable& get);

}  // namespace dynmo::runtime
