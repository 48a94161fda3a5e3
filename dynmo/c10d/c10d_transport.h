// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks as processes: a Transport over c10d's store and Gloo, with the control plane
// (elastic/control_plane.h) beside it. The only file that knows Gloo; no libtorch header is needed
// to use it.
//
// A user must know: Agree on sizes before.
//  - A group that has failed is finished; the survivors join one of the next generation. Their new
//    ranks are their own agreement.
//  - A rank that ends says so: leave() when its work is done, abort(why) when it has failed.
//    Otherwise the others take its end for a loss.
//  - After a failure a process ends by quit(), below.
//  - It does not set the number of intra-op threads: the rank calls at::set_num_threads(1).

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

class Store;    // through which the ranks of a run find each other; outlives groups
class Meeting;  // rank 0's end of a group that is to be: it listens

// Where the ranks of a group meet that have agreed on it: it needs no store.
using MeetingPlace = elastic::PlanePlace;

struct GroupOptions {
  WorldRank rank;
  int size = 1;
  std::vector<int> names = {};  // numbers for people, by rank; none: the ranks
  // The generation of the plan that the group begins with; keys of the store are the generation's
  // own.
  Generation generation = 0;
  std::string address = "127.0.0.1";
  std::uint16_t port = 29500;
  process::StoreHost store_host = process::StoreHost::kRank0;
  std::optional<int> store_fd = {};   // rank 0: a listening socket to be taken over
  std::string attempt = {};           // tells restarts that share one store apart
  std::shared_ptr<Store> store = {};  // of an earlier generation: address and port are not used
  // Serves all groups of this process; none: the group starts one of its own.
  std::shared_ptr<elastic::ControlPlane> plane = {};
  std::optional<MeetingPlace> meeting_place = {};  // instead of a store
  std::shared_ptr<Meeting> meeting = {};           // of rank 0: who listens there (open_meeting)
  int beside = 0;                // ranks of a group of this process that stays meanwhile
  std::string own_address = {};  // of this rank, as the others reach it; "": is found out
  // Asked now and then while the group forms; an error ends the joining of all with it.
  std::function<std::optional<Error>()> give_up = {};
  std::chrono::milliseconds join_timeout{60000};  // for all ranks to be there
  // Longest wait for one message. No detector of losses, that is the control plane: a rank may have
  // a reason to be busy for long. It ends what would hang forever for a bug.
  std::chrono::milliseconds message_timeout{1800000};
  // A rank not heard of for longer is lost; of a plane of the group's own.
  std::chrono::milliseconds silence{3000};
};

// Returns the options of a process that was started as a rank; the first generation.
[[nodiscard]] GroupOptions group_options(const process::RankEnvironment& environment);

// A Transport whose waits fail with kPeerLost and "rank 2 was lost: its connection closed", or with
// the reason that a rank gave to abort(), "rank 1: " in front where it is none of a loss. A Gloo
// error that comes before the plane's verdict waits for it, about 4 s at most.
class Group : public transport::Transport {
 public:
  // Ends the group for all ranks, not for this one only. Returns when the others have been told, so
  // that the process may end.
  void abort(const Error& why) override = 0;

  // Why the group failed, if it has. For loops that compute without waiting for messages.
  [[nodiscard]] virtual std::optional<Error> failure() const = 0;
  // When this process learned of that. Requires a failure.
  [[nodiscard]] virtual std::chrono::steady_clock::time_point failed_at() const = 0;

  // This rank's work is done: returns when all ranks' is. The group's failure if it fails first.
  [[nodiscard]] virtual Expected<void> leave() = 0;

  // For the next generation's GroupOptions. Usable while the process that opened it lives; null of
  // a group that has met without.
  [[nodiscard]] virtual std::shared_ptr<Store> store() const = 0;
  // Returns the address of this rank, as the others reach it; "" if the rank was alone from the
  // start.
  [[nodiscard]] virtual const std::string& address() const = 0;
};

// Joins the group of `options`; returns when all its ranks have. Ignores SIGPIPE from then on (a
// killed peer raises it). A group of one needs nobody and opens nothing.
//
// kBadInput: too few files may be open (descriptors.h), the port is in use, the address does not
// resolve, two processes are the same rank, or were started for different numbers of ranks.
// kPeerLost: not all ranks came in time, naming the missing, or one was lost while joining. The
// error of one rank ends the joining of all.
//
// Destroying a group that has neither failed nor been left is abort("rank 1 has left the group").
[[nodiscard]] Expected<std::unique_ptr<Group>> join_group(const GroupOptions& options);

// Rank 0 calls it before the others learn where to meet: listens at `options.own_address` (else
// `options.address`) on a free port. kBadInput.
[[nodiscard]] Expected<std::shared_ptr<Meeting>> open_meeting(const GroupOptions& options);
[[nodiscard]] const MeetingPlace& place_of(const Meeting& meeting);

// Ends the process at once, after flushing the streams: no destructors of static objects, no
// joining of threads. The end of a rank's main() after a failure, and of a launcher's. A group can
// be destroyed after a failure (0 of 63 hung, killed peers and 64 MiB on the wire included), but a
// failed join may leave a thread in Gloo's constructor, and the way out of libtorch takes 0.2 s.
// The caller has closed its files.
[[noreturn]] void quit(int exit_code);

}  // namespace dynmo::c10d
