// SPDX-License-Identifier: Apache-2.0
#pragma once

// What is to happen to an elastic run between two steps: who leaves, who joins, whether a
// checkpoint is written, whether it stops. Every rank is told the same and comes to the same, so no
// rank waits for another's opinion. It knows no transport.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/elastic/control_messages.h"
#include "dynmo/elastic/member.h"
#include "dynmo/plan/plan.h"
#include "dynmo/train/config.h"
#include "dynmo/train/control_service.h"

namespace dynmo::train {

// What one rank has to tell between two steps.
struct RankWord {
  bool leave = false;                 // somebody has asked this process to go
  std::vector<Wish> wishes = {};      // of the leader: what clients have asked for
  std::vector<Standby> joiners = {};  // likewise: as many as a multiple of the replicas
};
[[nodiscard]] std::string to_text(const RankWord& word);  // "" where there is nothing
[[nodiscard]] Expected<RankWord> parse_word(std::string_view text);

// Another number of ranks.
struct SizeChange {
  std::vector<Rank> kept = {};        // positions that stay, ascending
  std::vector<Standby> joiners = {};  // none where the first position leaves, as its rank leads
  std::string why;                    // for people
  process::ClientId client = 0;       // who hears what became of it; 0: nobody
  std::int64_t waited = 0;            // boundaries at which it was deferred
};

// What follows from the words of all ranks.
struct Turn {
  std::optional<SizeChange> change = {};
  bool checkpoint = false;
  std::optional<std::string> stop = {};  // why
  struct Answer {
    process::ClientId client = 0;
    elastic::Reply reply;
  };
  std::vector<Answer> answers = {};  // at once
  std::vector<process::ClientId> wait_for_checkpoint = {};
  std::vector<process::ClientId> wait_for_stop = {};
};

class SizeChanges {
 public:
  explicit SizeChanges(const Config& config) : config_(config.elastic) {}

  // Before step `step`, of a group with these members under this plan, whose words, if any rank had
  // one, are these (by world rank). `costs_known`: plans can be made. A change that cannot be made
  // now comes again (defer).
  [[nodiscard]] Turn next(const std::vector<RankWord>& words, const elastic::View& view,
                          const plan::Plan& plan, std::int64_t step, bool costs_known);
  // The change of the last turn has to wait for the next boundary.
  void defer(SizeChange change) {
    ++change.waited;
    deferred_ = std::move(change);
  }
  // The group has changed, or a change was refused.
  void done() { idle_since_.reset(); }

 private:
  void take(const Wish& wish, const elastic::View& view, const plan::Plan& plan, Turn& turn);
  void drain(int place, const elastic::View& view, const plan::Plan& plan, Turn& turn,
             process::ClientId client);
  void pack(int ranks, const plan::Plan& plan, Turn& turn, process::ClientId client);
  // A rank that was asked to leave says so at every boundary until it does.
  [[nodiscard]] bool tries_again(elastic::MemberId member, std::int64_t step);
  void release_idle(const plan::Plan& plan, std::int64_t step, Turn& turn);

  Config::Elastic config_;
  std::optional<SizeChange> deferred_;
  std::map<elastic::MemberId, std::int64_t>
      tried_;                               // members asked to leave: step of the newest try
  bool packed_ = false;                     // as elastic.pack_ranks asks
  std::vector<Rank> at_work_;               // in the newest step
  std::optional<std::int64_t> idle_since_;  // step since which the same ranks have no layers
};

}  // namespace dynmo::train
