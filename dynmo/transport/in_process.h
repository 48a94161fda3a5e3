// SPDX-License-Identifier: Apache-2.0
#pragma once

// A group whose ranks are threads of one process, for tests, examples, and the engine's equivalence
// with a single rank. It keeps the strictest rules of transport.h exactly. So a program that runs
// here cannot deadlock elsewhere because a buffer is missing.

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

struct InProcessOptions {
  // Longest time that one wait() may take before the group fails with kPeerLost.
  std::chrono::milliseconds deadline{30000};
};

// Returns the transports of ranks 0..size-1. Each belongs to one thread at a time, and they may be
// destroyed in any order. Requires size >= 1.
//
// The group fails as a whole on the first of these faults. Every outstanding and later wait then
// returns the fault at once:
//
// - abort()
// - a wait past the deadline (kPeerLost)
// - two ends that name different numbers of bytes (kInternal)
// - a message to or from a rank whose Transport was destroyed (kPeerLost)
// - an operation that was destroyed before wait() (kInternal)
[[nodiscard]] std::vector<std::unique_ptr<Transport>> make_in_process_group(
    int size, const InProcessOptions& options = {});

// Runs `rank` on one thread for each rank of a new group and joins them all. check_context().rank
// is set on each thread. The first Error or exception of a rank aborts the group, so that the other
// ranks end as well. The Error is returned, the exception rethrown.
[[nodiscard]] Expected<void> run_ranks(int size,
                                       const std::function<Expected<void>(Transport&)>& rank,
                                       const InProcessOptions& options = {});

}  // namespace dynmo::transport
