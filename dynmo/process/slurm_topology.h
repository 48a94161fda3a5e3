// SPDX-License-Identifier: Apache-2.0
#pragma once

// The switches above this host, as Slurm tells every task. SLURM_TOPOLOGY_ADDR is the path from the
// top of the network to the host (s0.s4.tux1). SLURM_TOPOLOGY_ADDR_PATTERN has the type of each
// part: switch.switch.node, block.node with blocks, or node without a topology.

#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/process/rank_environment.h"

namespace dynmo::process {

// Returns the parts before the host's name, joined by '.' ("s0.s4"), or "" if Slurm has given none.
// A part may be empty, if a host has no switch of a level, or be a list (s[1-2]). Returns kBadInput
// with the variables if they do not fit each other.
[[nodiscard]] Expected<std::string> switches_of_host();
[[nodiscard]] Expected<std::string> switches_of_host(const GetVariable& get);

}  // namespace dynmo::process
