// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tells the ranks of one group which of them is lost, over TCP connections of its own.
//
// Gloo cannot: bytes that are on the wire when their peer dies are waited for until the timeout,
// and a rank whose own neighbours are well hears nothing of a loss elsewhere. So every rank keeps a
// connection to rank 0 (a star) and sends a heartbeat over it. A connection that closes or is
// silent for too long is a lost rank; rank 0 tells everybody which. The loss of rank 0 is seen by
// all. The first verdict of a group is its only one, and it is the same at every rank.
//
// A rank that ends on purpose says so first, with its reason: then the reason is the verdict, and
// the end of its process is not taken for the cause. What the ranks tell each other while they form
// a group goes over the same connections, so that whoever waits for a word hears of a loss instead.
// Knows nothing of libtorch.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"

namespace dynmo::process {

struct WatchdogOptions {
  WorldRank rank;
  int size = 2;                             // >= 2
  std::vector<int> names = {};              // numbers for people, by rank; none: the ranks
  std::uint64_t secret = 0;                 // the group's own; whoever does not know it is ignored
  std::chrono::milliseconds period{100};    // from one heartbeat to the next
  std::chrono::milliseconds silence{3000};  // longer than this is a loss
};

// One rank's end, with a thread of its own. Any thread may call.
class Watchdog {
 public:
  // Called once, on the watchdog's thread, with the verdict. It must not call back.
  using OnVerdict = std::function<void(const Error&)>;

  // Rank 0: listens on a free port (`port()`) of `address`, from now on until it is destroyed.
  // Ranks that never connect are not missed: the watchdog does not know who should join.
  [[nodiscard]] static Expected<std::unique_ptr<Watchdog>> listen(const WatchdogOptions& options,
                                                                  const std::string& address,
                                                                  OnVerdict on_verdict);
  // The other ranks: connects to rank 0. kPeerLost if that fails for `time`.
  [[nodiscard]] static Expected<std::unique_ptr<Watchdog>> connect(const WatchdogOptions& options,
                                                                   const std::string& address,
                                                                   std::uint16_t port,
                                                                   OnVerdict on_verdict,
                                                                   std::chrono::milliseconds time);
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  // Stops the thread and closes the connections: without a verdict or leave(), the others take it
  // for the loss of this rank.
  ~Watchdog();

  [[nodiscard]] std::uint16_t port() const;  // of rank 0
  // Returns the address of this host for the other ranks, as the connection to rank 0 sees it.
  [[nodiscard]] std::string local_address() const;

  // "rank 2 was lost: its connection closed" with kPeerLost, or what a rank that ended on purpose
  // gave as its reason, with its code and its rank in front.
  [[nodiscard]] std::optional<Error> verdict() const;
  // Waits for one, at most so long.
  [[nodiscard]] std::optional<Error> verdict_within(std::chrono::milliseconds time) const;

  // Tells all ranks, those that connect later as well, that `key` has this value. Returns at once.
  // If a key has two values, the one that rank 0 received last counts.
  void tell(const std::string& key, const std::string& value);
  // Returns the value of the key; nullopt: it was not set yet.
  [[nodiscard]] std::optional<std::string> told(const std::string& key) const;
  // Waits until all keys have been told, at most so long: whether they have. The verdict if one
  // comes first.
  [[nodiscard]] Expected<bool> wait_for(const std::vector<std::string>& keys,
                                        std::chrono::milliseconds time) const;

  // This rank ends because of `why`, which becomes the verdict at every rank unless there is one
  // already. Returns when it is handed to the system, so that the process may end, or after half a
  // second.
  void announce(const Error& why);

  // This rank has finished its work: returns when all ranks have said so; the verdict if one comes
  // first; kPeerLost naming nobody after `deadline`. After it no connection is missed.
  [[nodiscard]] Expected<void> leave(std::chrono::milliseconds deadline);

 private:
  class Loop;
  explicit Watchdog(std::unique_ptr<Loop> loop);
  std::unique_ptr<Loop> loop_;
};

}  // namespace dynmo::process
