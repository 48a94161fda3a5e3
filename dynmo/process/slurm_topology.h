// SPDX-License-Identifier: Apache-2.0
#pragma once

// The switches above this host, as Slurm tells every task: SLURM_TOPOLOGY_ADDR is the way from the
// top of the network to the host (s0.s4.tux1), SLURM_TOPOLOGY_ADDR_PATTERN says which part is what
// (switch.switch.node; block.node with blocks; node alone where no topology is configured).

#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/process/rank_environment.h"

namespace dynmo::process {

// The parts before the host's name, joined by '.' ("s0.s4"). A part may be empty, where a host has
// no switch of a level, or be a list (s[1-2]). Empty: Slurm has not said any. kBadInput, naming the
// variables, where they do not fit each other.
[[nodiscard]] Expected<std::string> switches_of_host();
[[nodiscard]] Expected<std::string> switches_of_host(const GetVariable& get);

}  // namespace dynmo::process
