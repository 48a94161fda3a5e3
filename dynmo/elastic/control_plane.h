// SPDX-License-Identifier: Apache-2.0
#pragma once

// The control plane of a process: one thread, one listener, and connections to the planes of other
// ranks, for the whole run. It tells a group's ranks which of them is lost. It also carries the
// keys and values (words) by which they form a group.
//
// Gloo does not notice losses. If a peer dies, Gloo waits until the timeout for bytes that are in
// flight. A rank whose own neighbours live learns nothing of a loss elsewhere. So every rank of a
// group keeps a connection to the group's rank 0 (a star) and sends a heartbeat over it. One
// connection serves all groups that two processes share.
//
// If a connection closes, or is silent for too long, its rank is lost, and rank 0 tells all ranks.
// All ranks see the loss of rank 0 themselves. The first verdict of a group is its only one, and it
// is the same at every rank.
//
// A rank that ends on purpose announces that first, with its reason. Then the reason is the
// verdict, and the end of its process is not the cause. Knows nothing of libtorch.

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

// One rank's end of one group. Any thread may call. Destroying it ends this rank's part. If there
// was neither a verdict nor leave(), the other ranks take this for a loss of the rank.
class GroupWatch {
 public:
  GroupWatch(const GroupWatch&) = delete;
  GroupWatch& operator=(const GroupWatch&) = delete;
  ~GroupWatch();

  // Returns the verdict, if there is one. It is kPeerLost with "rank 2 was lost: its connection
  // closed". If a rank ended on purpose, it is that rank's code and reason, with the rank in front.
  [[nodiscard]] std::optional<Error> verdict() const;
  // Waits for a verdict, at most for `time`.
  [[nodiscard]] std::optional<Error> verdict_within(std::chrono::milliseconds time) const;

  // Tells all ranks, and those that connect later, that `key` has this value. Returns at once. If a
  // key gets two values, rank 0's latest counts.
  void tell(const std::string& key, const std::string& value);
  // Returns the value of the key, or nullopt if it was not set yet.
  [[nodiscard]] std::optional<std::string> told(const std::string& key) const;
  // Waits until all keys have been told, at most for `time`. Returns whether they have, or the
  // verdict if one comes first.
  [[nodiscard]] Expected<bool> wait_for(const std::vector<std::string>& keys,
                                        std::chrono::milliseconds time) const;

  // Ends the group because of `why`. It becomes the verdict at every rank unless one exists.
  // Returns when the system has the message, so that the process may end, or after five seconds.
  void announce(const Error& why);

  // Declares that this rank has finished its work. Returns when all ranks have. Returns the verdict
  // if one comes first, and kPeerLost if a rank is missing after `deadline`. Afterwards a closed
  // connection is no loss.
  [[nodiscard]] Expected<void> leave(std::chrono::milliseconds deadline);

  // Returns the address of this host for the other ranks, as the connection to rank 0 sees it.
  // Returns "" at rank 0.
  [[nodiscard]] std::string local_address() const;

 private:
  friend class ControlPlane;
  struct Ends;
  explicit GroupWatch(std::unique_ptr<Ends> ends);
  std::unique_ptr<Ends> ends_;
};

struct WatchOptions {
  // Groups that exist at the same time have different generations.
  Generation generation = 0;
  WorldRank rank;
  int size = 2;  // >= 2
  // Numbers of the ranks in messages to users. If empty, they are the ranks.
  std::vector<int> names = {};
  // Called once, on the plane's thread, with the verdict. It must not call the plane.
  std::function<void(const Error&)> on_verdict = [](const Error&) {};
};

// The place where the plane of a group's rank 0 listens.
struct PlanePlace {
  std::string address;
  std::uint16_t port = 0;
  // The secret of the run. A process that does not know it is ignored.
  std::uint64_t secret = 0;
};

// The state of another process. It is dead if its host says that its port has no listener, or that
// another process listens there. It is silent if it did not answer. Then it may be stopped or slow,
// or the network may be cut.
struct Answer {
  Fate fate = Fate::kSilent;
  std::string notice = {};  // of a process that is alive
};

struct PlaneOptions {
  MemberId id = {};                         // this process
  std::chrono::milliseconds period{100};    // from one heartbeat to the next
  std::chrono::milliseconds silence{3000};  // a longer silence is a loss
};

// The plane of one process. Any thread may call. Its connections stay open until the plane and all
// of its groups are destroyed.
class ControlPlane {
 public:
  [[nodiscard]] static std::shared_ptr<ControlPlane> start(const PlaneOptions& options);
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;
  ~ControlPlane();

  // Listens on a free port of `address` from now on. A second call changes nothing. Fails with
  // kBadInput.
  [[nodiscard]] Expected<void> listen(const std::string& address);
  // Returns the place where the plane listens. Requires that listen() has succeeded.
  [[nodiscard]] PlanePlace place() const;

  // Opens a group as its rank 0. The plane must listen. Ranks that never connect are not missed,
  // because the plane does not know which should join.
  [[nodiscard]] std::unique_ptr<GroupWatch> open(const WatchOptions& options);
  // Joins a group as a rank above 0. Connects to rank 0 unless this plane already has a connection
  // to it, and takes its secret as the run's. Returns kPeerLost if that fails for `time`.
  [[nodiscard]] Expected<std::unique_ptr<GroupWatch>> join(const WatchOptions& options,
                                                           const PlanePlace& place,
                                                           std::chrono::milliseconds time);

  // Watches processes of this host. From now on the end of one counts as the end of its connection,
  // which closes only once a killed process has returned its memory.
  void watch(const std::vector<Member>& members);

  // Sets the text that this plane returns to ask() calls of other processes.
  void post(const std::string& notice);
  // Asks the plane of `member`, which listened at `place`, and waits for the answer, at most for
  // `time`. If another process now has that port, the member is dead.
  [[nodiscard]] Answer ask(const PlanePlace& place, MemberId member,
                           std::chrono::milliseconds time) const;

  // Returns why planes that connect must wait, once. For example, no descriptor is free.
  [[nodiscard]] std::optional<std::string> take_failure() const;

 private:
  explicit ControlPlane(std::shared_ptr<PlaneLoop> loop);
  std::shared_ptr<PlaneLoop> loop_;
};

}  // namespace dynmo::elastic
