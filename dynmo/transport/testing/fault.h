// SPDX-License-Identifier: Apache-2.0
#pragma once

// A transport that misbehaves on scripted messages: what the tests of the engine and of migration
// are held against. It wraps any other transport of one rank.

#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "dynmo/transport/transport.h"

namespace dynmo::transport {

// A fault applies to the messages `first`, ..., `first + count - 1` (counted from 0, in the order
// this rank posts them) among those that match `on`, `peer` and the tags.
struct Fault {
  enum class Kind {
    kDrop,     // sends only: it looks sent, but never leaves; the receiver waits in vain
    kDelay,    // wait() returns no earlier than `delay` after the message was posted
    kCorrupt,  // the lowest bit of byte `byte` (modulo the size) is flipped on the way
    kFail,     // the group fails with `error`
    kCall,     // `call` runs before the message is posted, e.g. to raise SIGKILL
  };
  enum class On { kSend, kReceive };

  Kind kind = Kind::kFail;
  On on = On::kSend;
  std::optional<Member> peer = {};  // absent: any
  Tag first_tag = 0;
  Tag last_tag = std::numeric_limits<Tag>::max();
  int first = 0;
  int count = 1;
  std::chrono::milliseconds delay{0};
  std::size_t byte = 0;
  Error error{ErrorCode::kPeerLost, "injected fault"};
  std::function<void()> call = {};
};

// The first fault of the list that matches a message acts on it; each keeps its own count. A
// dropped receive is no fault of a network: requires kDrop to be on sends.
[[nodiscard]] std::unique_ptr<Transport> with_faults(std::unique_ptr<Transport> inner,
                                                     std::vector<Fault> faults);
// The same around a transport that somebody else owns and that must outlive the result.
[[nodiscard]] std::unique_ptr<Transport> with_faults(Transport& inner, std::vector<Fault> faults);

}  // namespace dynmo::transport
