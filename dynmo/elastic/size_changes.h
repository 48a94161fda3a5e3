// SPDX-License-Identifier: Apache-2.0
#pragma once

// Decides what happens to an elastic run between two steps: which ranks leave, which processes
// join, whether a checkpoint is written, whether the run stops. Every rank gets the same requests
// and decides the same. So no rank waits for another's decision. It knows no transport.

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

// A client's request for something between two steps.
struct ClientRequest {
  RequestKind kind = RequestKind::kStop;
  process::ClientId client = 0;  // client that gets the answer; 0: none
  int ranks = 0;
  int member = 0;
};

// A process that waits to become a rank.
struct Newcomer {
  process::ClientId client = 0;
  Member member;
  bool admitted = false;  // has a place in a group that will form
};

// One rank's requests between two steps.
struct RankRequest {
  bool leave = false;                        // this process was asked to leave
  std::vector<ClientRequest> requests = {};  // the leader's, from clients
  std::vector<Newcomer> newcomers = {};      // the leader's: a multiple of the replicas
};
[[nodiscard]] Json to_json(const RankRequest& request);  // null if there are none
[[nodiscard]] Expected<RankRequest> parse_rank_request(const Json& json);

// A change to another number of ranks.
struct SizeChange {
  std::vector<Rank> kept = {};  // positions that stay, ascending
  // Empty if the first position leaves, because its rank leads.
  std::vector<Newcomer> newcomers = {};
  std::string why;               // for the user
  process::ClientId client = 0;  // client that gets the answer; 0: none
  std::int64_t waited = 0;       // number of boundaries at which it was deferred
};

// Returns the members after a change, replica by replica: those that stay, then newcomers. The
// caller fills in its generation.
[[nodiscard]] View view_after(const SizeChange& change, const View& view, int replicas);

// The decision that follows from the requests of all ranks.
struct BoundaryDecision {
  std::optional<SizeChange> change = {};
  bool checkpoint = false;
  std::optional<std::string> stop = {};  // reason
  struct Answer {
    process::ClientId client = 0;
    Reply reply;
  };
  std::vector<Answer> answers = {};  // sent at once
  std::vector<process::ClientId> wait_for_checkpoint = {};
  std::vector<process::ClientId> wait_for_stop = {};
};

struct SizeOptions {
  // Target of a replica once costs are known, or 0 for none.
  int pack_ranks = 0;
  // Steps before a rank that could not leave tries again.
  std::int64_t release_after = 10;
  // Minimum for a replica. No rank leaves below it.
  int ranks_min = 1;
};

// Returns the ranks that the controller releases, as a change of the group under this plan.
[[nodiscard]] SizeChange change_of(const control::Release& release, const plan::Plan& plan);

class SizeChanges {
 public:
  explicit SizeChanges(const SizeOptions& options) : options_(options) {}

  // Decides before step `step` for a group with these members under this plan. `requests` are by
  // world rank, or empty if no rank has any. `costs_known` says whether plans can be made. The
  // caller defers a change that cannot be made now (defer()).
  [[nodiscard]] BoundaryDecision next(const std::vector<RankRequest>& requests, const View& view,
                                      const plan::Plan& plan, std::int64_t step, bool costs_known);
  // Defers the change of the last decision to the next boundary.
  void defer(SizeChange change) {
    ++change.waited;
    deferred_ = std::move(change);
  }

  [[nodiscard]] bool defers() const { return deferred_.has_value(); }

  // Returns what later decisions depend on, so that a rank that joins decides like the others.
  // Requires that no change is deferred.
  [[nodiscard]] Json state() const;
  [[nodiscard]] Expected<void> restore(const Json& state);
  // Returns whether the run has had the ranks that elastic.pack_ranks requests. A loss can end a
  // group before that.
  [[nodiscard]] bool has_been_packed() const { return has_been_packed_; }
  // Continues after a loss. `has_been_packed` is of any rank.
  void begin_again(bool has_been_packed) { has_been_packed_ = packed_ = has_been_packed; }

 private:
  void add(const ClientRequest& request, const View& view, const plan::Plan& plan,
           BoundaryDecision& decision);
  void drain(int place, const View& view, const plan::Plan& plan, BoundaryDecision& decision,
             process::ClientId client);
  // Packs onto fewer ranks, and empties whole hosts first.
  void pack(int ranks, const View& view, const plan::Plan& plan, BoundaryDecision& decision,
            process::ClientId client);
  // Returns whether a member that was asked to leave tries again now. Such a member requests to
  // leave at every boundary.
  [[nodiscard]] bool tries_again(MemberId member, std::int64_t step);

  SizeOptions options_;
  std::optional<SizeChange> deferred_;
  std::map<MemberId, std::int64_t> tried_;  // members asked to leave: step of the newest try
  bool packed_ = false;                     // as elastic.pack_ranks requests, or about to be
  bool has_been_packed_ = false;
};

}  // namespace dynmo::elastic
