// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rank of this process, as the environment describes it. The program that started the process
// sets it: our launcher, torchrun, mpirun, srun, a Kubernetes job (docs/clusters.md).

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"

namespace dynmo::process {

// The process that has the store through which the ranks find each other.
enum class StoreHost {
  kRank0,      // rank 0 opens it
  kElsewhere,  // open already, such as that of torchrun's agent
};

struct RankEnvironment {
  WorldRank rank;
  int size = 1;
  int local_rank = 0;  // among the ranks of this host
  std::string address = "127.0.0.1";
  std::uint16_t port = 29500;
  StoreHost store_host = StoreHost::kRank0;
  // A listening socket on address and port that rank 0 takes over.
  std::optional<int> store_fd = {};
  std::string attempt = {};  // distinguishes restarts that share a store
};

using GetVariable = std::function<const char*(const char*)>;

// Returns the rank and the size from the first variables of a launcher that are set. RANK,
// WORLD_SIZE and LOCAL_RANK are those of torchrun, our launcher, or a Kubernetes job.
// OMPI_COMM_WORLD_* are next (Open MPI). Then come PMI_* (MPICH, Intel MPI, srun with PMI-2), and
// SLURM_* of a step (srun). With RANK, a single process (WORLD_SIZE = 1) is a rank, which others
// may join. With the other variables it is not: it starts ranks like a process of a shell.
//
// The ranks meet at MASTER_ADDR and MASTER_PORT, which torchrun's names require. Other launchers
// need not give them. The address is then 127.0.0.1 if all ranks are on one host. Otherwise it is
// the first host of Slurm's allocation, on which rank 0 runs unless the user has requested another
// distribution. The port is 15000 to 29999, from the id of the job, so jobs that share a host
// differ.
//
// Returns nullopt if this process was not started as a rank. Returns kBadInput with the variable if
// one is missing or out of range.
[[nodiscard]] Expected<std::optional<RankEnvironment>> rank_environment();
[[nodiscard]] Expected<std::optional<RankEnvironment>> rank_environment(const GetVariable& get);

// Reads the switches above this host, as Slurm tells every task. SLURM_TOPOLOGY_ADDR is the path
// from the top of the network to the host (s0.s4.tux1). SLURM_TOPOLOGY_ADDR_PATTERN has the type of
// each part: switch.switch.node, block.node with blocks, or node without a topology.
//
// Returns the parts before the host's name, joined by '.' ("s0.s4"), or "" if Slurm has given none.
// A part may be empty, if a host has no switch of a level, or be a list (s[1-2]). Returns kBadInput
// with the variables if they do not fit each other.
[[nodiscard]] Expected<std::string> switches_of_host();
[[nodiscard]] Expected<std::string> switches_of_host(const GetVariable& get);

}  // namespace dynmo::process
