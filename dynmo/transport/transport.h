// SPDX-License-Identifier: Apache-2.0
#pragma once

// Byte channels between the ranks of one group. Implementations are in-process (ranks as threads,
// for tests and examples), Gloo through c10d (c10d/), and a decorator that injects faults.
//
// The rules are those of the strictest implementation, Gloo:
//
// - A send completes only after its receive is posted (rendezvous, at any size).
// - Both ends of a message name the same number of bytes.
// - Messages of one (source, destination, tag) arrive in the order sent.
// - After the first error the group has ended. Every later call fails with the same error.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"

namespace dynmo::transport {

// A process by its number in one transport. It is a rank in the transport of its pipeline, a
// replica's number among peers, and a world rank in the group of all.
using Member = Id<struct MemberTag>;

using Tag = std::int32_t;  // >= 0; divided in transport/tags.h

// A posted send or receive. The bytes must stay alive until wait() has returned. An operation may
// be destroyed before wait() only if the group has failed.
class Operation {
 public:
  Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  virtual ~Operation() = default;

  // Waits until the bytes are sent (received by the peer's transport) or received. Otherwise
  // returns kPeerLost, with the lost rank if it is known. Called once.
  [[nodiscard]] virtual Expected<void> wait() = 0;
};

// One rank's end of a group. One thread posts and waits. Any thread may call abort().
class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  [[nodiscard]] virtual Member rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  // Returns the number of a rank for people, which stays the same when the group changes
  // (`dynmo ctl RUN status` shows it). Requires rank < size().
  [[nodiscard]] virtual int number_of(Member rank) const { return rank.value; }

  // Posts a message without blocking. Requires peer != rank(), peer < size(), bytes not empty.
  [[nodiscard]] virtual std::unique_ptr<Operation> send(Member to, Tag tag,
                                                        std::span<const std::byte> bytes) = 0;
  [[nodiscard]] virtual std::unique_ptr<Operation> receive(Member from, Tag tag,
                                                           std::span<std::byte> bytes) = 0;

  // Ends the group: all outstanding and later operations fail with `why`. Only the first call has
  // an effect.
  virtual void abort(const Error& why) = 0;
};

// Returns the contribution of every rank, in order of rank. All ranks call it in the same order and
// give the same number of bytes. Fails with kPeerLost.
[[nodiscard]] Expected<std::vector<std::vector<std::byte>>> all_gather(
    Transport& transport, Tag tag, std::span<const std::byte> mine);

}  // namespace dynmo::transport
