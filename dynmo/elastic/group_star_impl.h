// SPDX-License-Identifier: Apache-2.0
#pragma once

// One rank's view of a group in its control plane. Rank 0 knows all other ranks; another rank knows
// rank 0. The plane's mutex guards it. Frames that it sends are queued at their connection for the
// plane's thread.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/elastic/control_plane.h"
#include "dynmo/process/peer_connection.h"

namespace dynmo::elastic {

class GroupStar;

// The connection to another process's plane.
struct PlanePeer : process::PeerConnection {
  MemberId id = {};  // set by its hello
  // "ADDRESS:PORT", or "" if the other end has connected.
  std::string dialled_at = {};
  std::uint32_t last_channel = 0;
  std::map<std::uint32_t, std::shared_ptr<GroupStar>> channels = {};
  // Processes that have joined groups that are not open yet, and what they have sent since.
  struct Early {
    process::Join join;
    std::vector<std::pair<process::FrameType, std::string>> frames = {};
  };
  std::map<std::uint32_t, Early> waiting = {};
};

class GroupStar {
 public:
  explicit GroupStar(WatchOptions options);

  [[nodiscard]] const WatchOptions& options() const { return options_; }
  [[nodiscard]] bool is_rank_0() const { return options_.rank == WorldRank(0); }
  [[nodiscard]] bool is_over() const { return verdict_.has_value() || all_done_; }
  [[nodiscard]] const std::optional<Error>& verdict() const { return verdict_; }
  [[nodiscard]] bool all_done() const { return all_done_; }
  [[nodiscard]] const std::map<std::string, std::string>& words() const { return words_; }
  [[nodiscard]] Error lost(int rank, const std::string& why) const;

  // Connects `peer` as this rank. Returns false if there is no such rank, or if it was connected
  // before.
  [[nodiscard]] bool connect(int rank, PlanePeer& peer, std::uint32_t channel);
  // Takes a frame of the group from the connection of `peer`. Returns false if it is malformed.
  [[nodiscard]] bool take(const PlanePeer& peer, process::FrameType type, std::string_view rest);
  // Handles a closed or a silent connection. It is a loss unless the rank's work is done.
  void close(const PlanePeer& peer);
  void find_silent(const PlanePeer& peer, const std::string& why);

  // Does what the function of the same name of GroupWatch does, for this rank.
  void tell(const process::Word& word);
  void announce(const Error& why);
  void leave();
  [[nodiscard]] bool is_flushed() const;
  // Ends this rank's part, and tells the other ranks.
  void end();

  // Returns whether the verdict has come from another rank since the last call. Then the plane must
  // report it.
  [[nodiscard]] bool take_news() { return std::exchange(news_, false); }

 private:
  struct Spoke {
    PlanePeer* peer = nullptr;  // null if not connected
    std::uint32_t channel = 0;
    bool was_here = false;
    // Its work is done, so its end is no loss.
    bool done = false;
  };
  [[nodiscard]] int name(int rank) const;
  [[nodiscard]] int rank_of(const PlanePeer& peer) const;  // -1: none
  [[nodiscard]] Spoke& spoke(int rank) { return spokes_[static_cast<std::size_t>(rank)]; }
  static void send(const Spoke& to, process::FrameType type, std::string_view text);
  void broadcast(process::FrameType type, std::string_view text, int but = -1);
  void decide(const Error& error);
  void check_all_done();

  const WatchOptions options_;
  // Connections by rank. A rank other than 0 has only that to rank 0.
  std::vector<Spoke> spokes_;
  std::optional<Error> verdict_;
  std::map<std::string, std::string> words_;  // all that has been told
  bool leaving_ = false;
  bool all_done_ = false;
  bool news_ = false;
};

}  // namespace dynmo::elastic
