// SPDX-License-Identifier: Apache-2.0
#pragma once

// The control plane of a process: one thread, one listener, and connections to the planes of other
// ranks, for as long as the run lasts. It tells the ranks of a group which of them is lost, and
// carries the words by which they form a group.
//
// Gloo cannot tell of losses: bytes that are on the wire when their peer dies are waited for until
// the timeout, and a rank whose own neighbours are well hears nothing of a loss elsewhere. So every
// rank of a group keeps a connection to the group's rank 0 (a star) and sends a heartbeat over it.
// One connection serves all groups that two processes share. A connection that closes or is silent
// for too long is a lost rank; rank 0 tells everybody which. All ranks see the loss of rank 0. The
// first verdict of a group is its only one, and it is the same at every rank.
//
// A rank that ends on purpose says so first, with its reason: then the reason is the verdict, and
// the end of its process is not taken for the cause. Knows nothing of libtorch.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/elastic/member.h"

namespace dynmo::elastic {

class PlaneLoop;

// One rank's end of one group, which ends with it: without a verdict or leave(), the others take
// that for the loss of this rank. Any thread may call.
class GroupWatch {
 public:
  GroupWatch(const GroupWatch&) = delete;
  GroupWatch& operator=(const GroupWatch&) = delete;
  ~GroupWatch();

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

  // This rank ends the group because of `why`, which becomes the verdict at every rank unless there
  // is one already. Returns when it is handed to the system, so that the process may end, or after
  // five seconds.
  void announce(const Error& why);

  // This rank has finished its work: returns when all ranks have said so; the verdict if one comes
  // first; kPeerLost naming nobody after `deadline`. After it no connection is missed.
  [[nodiscard]] Expected<void> leave(std::chrono::milliseconds deadline);

  // Returns the address of this host for the other ranks, as the connection to rank 0 sees it; ""
  // at rank 0.
  [[nodiscard]] std::string local_address() const;

 private:
  friend class ControlPlane;
  struct Ends;
  explicit GroupWatch(std::unique_ptr<Ends> ends);
  std::unique_ptr<Ends> ends_;
};

struct WatchOptions {
  Generation generation = 0;  // of two groups at a time, not the same
  WorldRank rank;
  int size = 2;                 // >= 2
  std::vector<int> names = {};  // numbers for people, by rank; none: the ranks
  // Called once, on the plane's thread, with the verdict. It must not call back.
  std::function<void(const Error&)> on_verdict = [](const Error&) {};
};

// Where the plane of a group's rank 0 listens.
struct PlanePlace {
  std::string address;
  std::uint16_t port = 0;
  std::uint64_t secret = 0;  // the run's own; whoever does not know it is ignored
};

// The state of another process. Dead is one where its host says that nobody listens at its port any
// more, or somebody else; silent one that did not answer: it may be stopped or slow, or the way
// cut.
struct Answer {
  Fate fate = Fate::kSilent;
  std::string notice = {};  // of one that is alive
};

struct PlaneOptions {
  MemberId id = {};                         // this process
  std::chrono::milliseconds period{100};    // from one heartbeat to the next
  std::chrono::milliseconds silence{3000};  // longer than this is a loss
};

// Any thread may call. A plane that is destroyed lives on until the last of its groups is.
class ControlPlane {
 public:
  [[nodiscard]] static std::shared_ptr<ControlPlane> start(const PlaneOptions& options);
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;
  ~ControlPlane();

  // Listens on a free port of `address` from now on; a second call changes nothing. kBadInput.
  [[nodiscard]] Expected<void> listen(const std::string& address);
  // Requires that it listens.
  [[nodiscard]] PlanePlace place() const;

  // A group's rank 0, whose plane listens. Ranks that never connect are not missed: the plane does
  // not know who should join.
  [[nodiscard]] std::unique_ptr<GroupWatch> open(const WatchOptions& options);
  // The other ranks: connects to rank 0 unless this plane has a connection to it already, and takes
  // its secret for the run's. kPeerLost if that fails for `time`.
  [[nodiscard]] Expected<std::unique_ptr<GroupWatch>> join(const WatchOptions& options,
                                                           const PlanePlace& place,
                                                           std::chrono::milliseconds time);

  // From now on this plane takes the end of these processes of this host for the end of their
  // connections, which close only once a killed process has given its memory back.
  void watch(const std::vector<Member>& members);

  // Those that ask this process's plane get this answer from now on.
  void post(const std::string& notice);
  // Asks the plane that the process `member` listened with at `place`, and waits for the answer, at
  // most so long. Whoever has that port by now is another member, or nobody.
  [[nodiscard]] Answer ask(const PlanePlace& place, MemberId member,
                           std::chrono::milliseconds time) const;

 private:
  explicit ControlPlane(std::shared_ptr<PlaneLoop> loop);
  std::shared_ptr<PlaneLoop> loop_;
};

}  // namespace dynmo::elastic
