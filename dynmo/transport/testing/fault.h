// SPDX-License-Identifier: Apache-2.0
#pragma once

// A transport that misbehaves on scripted messages, for tests of the engine and of migration. It
// wraps any other transport of one rank.

#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "dynmo/transport/transport.h"

namespace dynmo::transport {

// A fault applies to a range of the messages that match `on`, `peer` and the tags. The range is
// `first`, ..., `first + count - 1`, counted from 0 in the order in which this rank posts them.
struct Fault {
  enum class Kind {
    // Sends only. The message looks sent, but never leaves, and the receiver waits in vain.
    kDrop,
    kDelay,    // wait() returns no earlier than `delay` after posting
    kCorrupt,  // the lowest bit of byte `byte` (modulo the size) is flipped
    kFail,     // the group fails with `error`
    kCall,     // `call` runs before posting, e.g. to raise SIGKILL
  };
  enum class On { kSend, kReceive };

  Kind kind = Kind::kFail;
  On on = On::kSend;
  std::optional<Member> peer = {};  // any if absent
  Tag first_tag = 0;
  Tag last_tag = std::numeric_limits<Tag>::max();
  int first = 0;
  int count = 1;
  std::chrono::milliseconds delay{0};
  std::size_t byte = 0;
  Error error{ErrorCode::kPeerLost, "injected fault"};
  std::function<void()> call = {};
};

// Wraps `inner`. The first fault of the list that matches a message acts on it. Each fault keeps
// its own count. Requires kDrop to be on sends only, because a dropped receive is no fault of a
// network.
[[nodiscard]] std::unique_ptr<Transport> with_faults(std::unique_ptr<Transport> inner,
                                                     std::vector<Fault> faults);
// Like with_faults() above, but does not own `inner`, which must outlive the result.
[[nodiscard]] std::unique_ptr<Transport> with_faults(Transport& inner, std::vector<Fault> faults);

}  // namespace dynmo::transport
