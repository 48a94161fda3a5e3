// SPDX-License-Identifier: Apache-2.0
#pragma once

// A group whose ranks are threads of one process: for tests, examples, and the engine's equivalence
// with a single rank. It keeps the strictest rules of transport.h to the letter, so that what runs
// here cannot deadlock elsewhere for want of a buffer.

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

struct InProcessOptions {
  // Longest time one wait() may take before the group fails with kPeerLost.
  std::chrono::milliseconds deadline{30000};
};

// Transports of ranks 0..size-1. Each belongs to one thread at a time; they may outlive each other.
//
// The group fails as a whole: on abort, on a wait past the deadline (kPeerLost), on two ends that
// name different numbers of bytes (kInternal), on a message to or from a rank whose Transport was
// destroyed (kPeerLost), on an operation destroyed before it was waited for (kInternal). The first
// of these is what every outstanding and later wait returns, at once. Requires size >= 1.
[[nodiscard]] std::vector<std::unique_ptr<Transport>> make_in_process_group(
    int size, const InProcessOptions& options = {});

// Runs `rank` on a thread per rank of a new group and joins them all. The first Error or exception
// of a rank aborts the group, so that the others end as well; the Error is returned, the exception
// rethrown. check_context().rank is set.
[[nodiscard]] Expected<void> run_ranks(int size,
                                       const std::function<Expected<void>(Transport&)>& rank,
                                       const InProcessOptions& options = {});

}  // namespace dynmo::transport
