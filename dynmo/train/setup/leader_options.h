// SPDX-License-Identifier: Apache-2.0
#pragma once

// Options for the elastic parts of dynmo::core, which know no settings of a training.

#include "dynmo/config/config.h"
#include "dynmo/elastic/control_messages.h"
#include "dynmo/elastic/groups.h"
#include "dynmo/elastic/leader.h"
#include "dynmo/elastic/size_changes.h"
#include "dynmo/train/setup/resolved_run.h"

namespace dynmo::train {

// Returns the values that must be equal in all processes of a run (elastic::check_same).
[[nodiscard]] elastic::Build this_build(const ResolvedRun& run);

[[nodiscard]] elastic::SizeOptions size_options(const config::Config& config);

// Returns the options for `self`, the next leader. All arguments outlive the leader. The caller
// sets the number of the first member that joins, unless it is in the earlier leader's handover.
[[nodiscard]] elastic::Leader::Options leader_options(const elastic::Groups& groups,
                                                      const elastic::Member& self,
                                                      const ResolvedRun& run);

}  // namespace dynmo::train
