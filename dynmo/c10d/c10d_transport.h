// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks as processes: a Transport over c10d's store and Gloo, with the control plane
// (elastic/control_plane.h) beside it. The only file that knows Gloo. Its users need no header of
// libtorch.
//
// Rules for users:
//
// - The two ends of a message agree on its size beforehand.
// - A group that has failed has ended. The survivors join one of the next generation, and agree
//   themselves on their new ranks.
// - A rank announces its end: by leave() when its work is done, by abort(why) when it has failed.
//   Otherwise the other ranks take its end for a loss.
// - After a failure a process ends by quit(), below.
// - A group does not set the number of intra-op threads: the rank calls at::set_num_threads(1).

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/elastic/control_plane.h"
#include "dynmo/process/rank_environment.h"
#include "dynmo/transport/transport.h"

namespace dynmo::c10d {

// The ranks of a run find each other through a Store, which outlives groups.
class Store;
// Rank 0's end of a group that will form: it listens.
class Meeting;

// The place where ranks that have agreed on a group meet. They need no store.
using MeetingPlace = elastic::PlanePlace;

struct GroupOptions {
  WorldRank rank;
  int size = 1;
  // Numbers of the ranks in messages to users. If empty, they are the ranks.
  std::vector<int> names = {};
  // The generation of the plan with which the group begins. Each generation has its own keys in the
  // store.
  Generation generation = 0;
  std::string address = "127.0.0.1";
  std::uint16_t port = 29500;
  process::StoreHost store_host = process::StoreHost::kRank0;
  // A listening socket that rank 0 takes over.
  std::optional<int> store_fd = {};
  std::string attempt = {};  // distinguishes restarts that share a store
  // The store of an earlier generation. Then address and port are not used.
  std::shared_ptr<Store> store = {};
  // Serves all groups of this process. If null, the group starts a plane of its own.
  std::shared_ptr<elastic::ControlPlane> plane = {};
  std::optional<MeetingPlace> meeting_place = {};  // replaces the store
  // Rank 0's listener at meeting_place, from open_meeting().
  std::shared_ptr<Meeting> meeting = {};
  // Number of ranks of another group of this process that exists at the same time.
  int beside = 0;
  // Address at which other ranks reach this one. If empty, joining finds it.
  std::string own_address = {};
  // Called repeatedly while the group forms. Its error ends the joining on all ranks.
  std::function<std::optional<Error>()> give_up = {};
  std::chrono::milliseconds join_timeout{60000};  // until all ranks have joined
  // Longest wait for one message. It ends a wait that a bug would make endless. The control plane
  // detects losses: a slow rank is not lost.
  std::chrono::milliseconds message_timeout{1800000};
  // Time after which a silent rank is lost, in a plane that the group starts itself.
  std::chrono::milliseconds silence{3000};
};

// Returns the options of a process that was started as a rank, for the first generation.
[[nodiscard]] GroupOptions group_options(const process::RankEnvironment& environment);

// A Transport. After a loss, waits fail with kPeerLost and "rank 2 was lost: its connection
// closed". After abort() on another rank they fail with its reason, with "rank 1: " before it if
// the reason is not a loss. An earlier error of Gloo is held back until the verdict of the control
// plane, for up to about 4 s.
class Group : public transport::Transport {
 public:
  // Ends the group for all ranks, not only for this one. Returns when the other ranks have been
  // told, so the process may end.
  void abort(const Error& why) override = 0;

  // Returns the failure of the group, if it has failed. Loops that compute without waiting for
  // messages call it.
  [[nodiscard]] virtual std::optional<Error> failure() const = 0;
  // Returns the time at which this process learned of the failure. Requires a failure.
  [[nodiscard]] virtual std::chrono::steady_clock::time_point failed_at() const = 0;

  // Ends this rank's part. Returns when the work of all ranks is done, or the group's failure if it
  // fails first.
  [[nodiscard]] virtual Expected<void> leave() = 0;

  // Returns the store for the next generation's GroupOptions, or null if the group has met without
  // one. It works while the process that opened it lives.
  [[nodiscard]] virtual std::shared_ptr<Store> store() const = 0;
  // Returns a store that keeps its values in this group's control plane. They end with the group. A
  // rank that waits for a value gets an exception when a rank is lost. Requires size() > 1.
  [[nodiscard]] virtual std::shared_ptr<Store> words() const = 0;
  // Returns the address at which other ranks reach this one, or "" if the rank was alone from the
  // start.
  [[nodiscard]] virtual const std::string& address() const = 0;
};

// Joins the group of `options`. Returns when all its ranks have joined. Ignores SIGPIPE from then
// on, because a killed peer raises it. A group of one waits for no rank and opens nothing.
//
// Returns kBadInput for:
//
// - a limit of open files that is too low (process/host_memory.h)
// - a port in use, or an address that does not resolve
// - two processes with the same rank, or started for different numbers of ranks
//
// Returns kPeerLost, with the missing ranks, if not all came in time, or if one was lost while
// joining. The error of one rank ends the joining of all.
//
// Destroying a group that has neither failed nor been left is abort("rank 1 has left the group").
[[nodiscard]] Expected<std::unique_ptr<Group>> join_group(const GroupOptions& options);

// Listens at `options.own_address`, or `options.address` if that is empty, on a free port. Rank 0
// calls it before the other ranks learn where to meet. Fails with kBadInput.
[[nodiscard]] Expected<std::shared_ptr<Meeting>> open_meeting(const GroupOptions& options);
[[nodiscard]] const MeetingPlace& place_of(const Meeting& meeting);

// Ends the process at once, after flushing the streams. It runs no destructors of static objects
// and joins no threads. The caller has closed its files. Each rank of `dynmo train` ends with it.
// The usual exit of libtorch takes 0.2 s, and a failed join may leave a thread in Gloo's
// constructor. A failed group may be destroyed before the call.
[[noreturn]] void quit(int exit_code);

}  // namespace dynmo::c10d
