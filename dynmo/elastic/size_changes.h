// SPDX-License-Identifier: Apache-2.0
#pragma once

// Decides what happens to an elastic run between two steps: who leaves, who joins, whether a
// checkpoint is written, whether the run stops. Every rank is told the same and decides the same,
// so that no rank waits for another's opinion. It knows no transport.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/control/controller.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/elastic/control_messages.h"
#include "dynmo/elastic/member.h"
#include "dynmo/plan/plan.h"
#include "dynmo/process/line_server.h"

namespace dynmo::elastic {

// Something that a client wants to happen between two steps.
struct ClientRequest {
  RequestKind kind = RequestKind::kStop;
  process::ClientId client = 0;  // who is answered; 0: nobody
  int ranks = 0;
  int member = 0;
};

// A process that may become a rank, and waits.
struct Newcomer {
  process::ClientId client = 0;
  Member member;
  bool admitted = false;  // it has a place in a group that is to be
};

// One rank's requests between two steps.
struct RankRequest {
  bool leave = false;                        // somebody has asked this process to go
  std::vector<ClientRequest> requests = {};  // the leader's: what clients have asked for
  std::vector<Newcomer> newcomers = {};      // the leader's: a multiple of the replicas
};
[[nodiscard]] Json to_json(const RankRequest& request);  // null where there is nothing
[[nodiscard]] Expected<RankRequest> parse_rank_request(const Json& json);

// Another number of ranks.
struct SizeChange {
  std::vector<Rank> kept = {};           // positions that stay, ascending
  std::vector<Newcomer> newcomers = {};  // none where the first position leaves, as its rank leads
  std::string why;                       // for people
  process::ClientId client = 0;          // who is answered; 0: nobody
  std::int64_t waited = 0;               // boundaries at which it was deferred
};

// The members after a change, replica by replica: those that stay, then newcomers. Its generation
// is the caller's to fill in.
[[nodiscard]] View view_after(const SizeChange& change, const View& view, int replicas);

// The decision that follows from the requests of all ranks.
struct BoundaryDecision {
  std::optional<SizeChange> change = {};
  bool checkpoint = false;
  std::optional<std::string> stop = {};  // why
  struct Answer {
    process::ClientId client = 0;
    Reply reply;
  };
  std::vector<Answer> answers = {};  // at once
  std::vector<process::ClientId> wait_for_checkpoint = {};
  std::vector<process::ClientId> wait_for_stop = {};
};

struct SizeOptions {
  int pack_ranks = 0;               // of a replica: onto so many once costs are known; 0: none
  std::int64_t release_after = 10;  // steps before a rank that could not leave tries again
  int ranks_min = 1;                // of a replica: none leaves below it
};

// The ranks that the controller releases, as a change of the group under this plan.
[[nodiscard]] SizeChange change_of(const control::Release& release, const plan::Plan& plan);

class SizeChanges {
 public:
  explicit SizeChanges(const SizeOptions& options) : options_(options) {}

  // Decides before step `step` for a group with these members under this plan. `requests` has those
  // of all ranks by world rank, or is empty where no rank has any. `costs_known`: plans can be
  // made. A change that cannot be made now comes again (defer).
  [[nodiscard]] BoundaryDecision next(const std::vector<RankRequest>& requests, const View& view,
                                      const plan::Plan& plan, std::int64_t step, bool costs_known);
  // The change of the last decision has to wait for the next boundary.
  void defer(SizeChange change) {
    ++change.waited;
    deferred_ = std::move(change);
  }

  // Returns what a later decision depends on, for a rank that joins: it decides as the others do.
  // Requires that no change is deferred.
  [[nodiscard]] Json state() const;
  [[nodiscard]] Expected<void> restore(const Json& state);

 private:
  void add(const ClientRequest& request, const View& view, const plan::Plan& plan,
           BoundaryDecision& decision);
  void drain(int place, const View& view, const plan::Plan& plan, BoundaryDecision& decision,
             process::ClientId client);
  // Whole hosts are emptied first.
  void pack(int ranks, const View& view, const plan::Plan& plan, BoundaryDecision& decision,
            process::ClientId client);
  // A rank that was asked to leave says so at every boundary until it does.
  [[nodiscard]] bool tries_again(MemberId member, std::int64_t step);

  SizeOptions options_;
  std::optional<SizeChange> deferred_;
  std::map<MemberId, std::int64_t> tried_;  // members asked to leave: step of the newest try
  bool packed_ = false;                     // as elastic.pack_ranks asks
};

}  // namespace dynmo::elastic
