// SPDX-License-Identifier: Apache-2.0
#pragma once

// A group as the control plane of one of its ranks has it: rank 0 knows all others, another rank
// knows rank 0. The plane guards it by its mutex; frames that it sends wait at their connection for
// the plane's thread.

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
  MemberId id = {};             // once its hello has come
  std::string dialled_at = {};  // "ADDRESS:PORT"; "": the other end has connected
  std::uint32_t last_channel = 0;
  std::map<std::uint32_t, std::shared_ptr<GroupStar>> channels = {};
  // Those that have joined groups that are not open yet, and what they sent since.
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

  // Connects `peer` as this rank; false: there is no such rank, or it has been here already.
  [[nodiscard]] bool connect(int rank, PlanePeer& peer, std::uint32_t channel);
  // Takes a frame of the group from that connection. False: it is malformed.
  [[nodiscard]] bool take(const PlanePeer& peer, process::FrameType type, std::string_view rest);
  // The rank behind the connection has gone, or is silent: a loss unless its work is done.
  void close(const PlanePeer& peer);
  void find_silent(const PlanePeer& peer, const std::string& why);

  // This rank's own.
  void tell(const process::Word& word);
  void announce(const Error& why);
  void leave();
  [[nodiscard]] bool is_flushed() const;
  // Ends this rank's end: the others hear that it is gone.
  void end();

  // Whether the verdict has come from elsewhere since the last call: it is to be told.
  [[nodiscard]] bool take_news() { return std::exchange(news_, false); }

 private:
  struct Spoke {
    PlanePeer* peer = nullptr;  // none: not connected, or not any more
    std::uint32_t channel = 0;
    bool was_here = false;
    bool done = false;  // has finished its work: its end is no loss
  };
  [[nodiscard]] int name(int rank) const;
  [[nodiscard]] int rank_of(const PlanePeer& peer) const;  // -1: none
  [[nodiscard]] Spoke& spoke(int rank) { return spokes_[static_cast<std::size_t>(rank)]; }
  static void send(const Spoke& to, process::FrameType type, std::string_view text);
  void broadcast(process::FrameType type, std::string_view text, int but = -1);
  void decide(const Error& error);
  void check_all_done();

  const WatchOptions options_;
  std::vector<Spoke> spokes_;  // by rank; of a rank that is not 0: only that to rank 0
  std::optional<Error> verdict_;
  std::map<std::string, std::string> words_;  // all that has been told
  bool leaving_ = false;
  bool all_done_ = false;
  bool news_ = false;
};

}  // namespace dynmo::elastic
