// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory and open files of this process and its host, as the system counts them.

#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"

namespace dynmo::process {

// Returns the resident memory, or 0 if the system does not report it.
[[nodiscard]] Bytes resident_memory();

// Returns the memory of this host, with its swap, or 0 if the system does not report it.
[[nodiscard]] Bytes host_memory();

// Returns the memory that programs may still take on this host, or 0 if the system does not report
// it.
[[nodiscard]] Bytes available_memory();

// Returns the descriptors that a rank of a run with `ranks` ranks may need. Gloo has a connection
// to every other rank. Rank 0 also has those of store and control plane. The same number again is
// needed while joining. 64 are for what any rank has open.
[[nodiscard]] constexpr int descriptors_of_rank(int ranks) { return 4 * ranks + 64; }

// Returns the descriptors of a process that starts `ranks` ranks: two pipes or processes each.
[[nodiscard]] constexpr int descriptors_of_launcher(int ranks) { return 2 * ranks + 32; }

// Lets this process open `wanted` descriptors, and raises its own limit up to the hard one. Returns
// kBadInput if that is lower: "... at most 64 open files here, wanted 128 for ...".
[[nodiscard]] Expected<void> allow_descriptors(int wanted, std::string_view whom);

}  // namespace dynmo::process
