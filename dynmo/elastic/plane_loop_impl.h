// SPDX-License-Identifier: Apache-2.0
#pragma once

// The thread of a control plane, with its connections and groups. One mutex guards all of it. The
// thread releases the mutex while it waits and while it reports verdicts.

#include <poll.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "dynmo/elastic/control_plane.h"
#include "dynmo/elastic/group_star_impl.h"
#include "dynmo/process/listener.h"

namespace dynmo::elastic {

// A watched process of this host. The plane's thread sets `ended` when it sees that the process has
// ended.
struct WatchedProcess {
  MemberId id = {};
  process::UniqueFd end;
  bool ended = false;
};

class PlaneLoop {
 public:
  using Clock = std::chrono::steady_clock;

  explicit PlaneLoop(const PlaneOptions& options);
  PlaneLoop(const PlaneLoop&) = delete;
  PlaneLoop& operator=(const PlaneLoop&) = delete;
  ~PlaneLoop();

  [[nodiscard]] Expected<void> listen(const std::string& address);
  [[nodiscard]] PlanePlace place() const;
  [[nodiscard]] std::shared_ptr<GroupStar> open(const WatchOptions& options);
  [[nodiscard]] Expected<std::shared_ptr<GroupStar>> join(const WatchOptions& options,
                                                          const PlanePlace& place,
                                                          std::chrono::milliseconds time,
                                                          std::string& own_address);
  void end(GroupStar& star);
  void watch(const std::vector<Member>& members);
  void post(const std::string& notice);
  [[nodiscard]] std::string hello() const;  // Returns this end's first frame.
  [[nodiscard]] std::optional<std::string> take_failure() {
    return listening_.listener.take_failure();
  }

  // Changes state under the mutex and wakes the thread.
  template <typename Change>
  auto request(const Change& change) {
    const std::lock_guard lock(mutex_);
    wake();
    changed_.notify_all();
    return change();
  }
  template <typename Look>
  auto look(const Look& look_at) const {
    const std::lock_guard lock(mutex_);
    return look_at();
  }
  // Waits until `is_so`, called under the mutex, returns true, at most for `time`. Returns its last
  // value.
  template <typename IsSo>
  bool wait_until(std::chrono::milliseconds time, const IsSo& is_so) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, is_so);
  }

 private:
  using State = process::PeerConnection::State;
  using Lock = std::unique_lock<std::mutex>;
  struct Listening {
    process::Listener listener;
    std::string address;
  };
  struct Stars {
    std::vector<std::shared_ptr<GroupStar>> open;
    // Groups of this rank 0 that other processes may still want to join.
    std::map<Generation, Error> ended;
  };

  [[nodiscard]] std::string own_hello() const;
  void wake();
  void run();
  void wait_for_events(Lock& lock, Clock::time_point until);
  void read_peers();
  State handle(PlanePeer& peer, const process::Frame& frame);
  State handle_hello(PlanePeer& peer, std::string_view rest);
  State handle_of_group(PlanePeer& peer, const process::Frame& frame);
  State handle_of_group(PlanePeer& peer, process::FrameType type, const process::OfGroup& of_group);
  State handle_join(PlanePeer& peer, std::uint32_t channel, const process::Join& join);
  void handle_closed(PlanePeer& peer);
  void handle_ended();
  void check_silence(Clock::time_point now);
  void tell_verdicts(Lock& lock);
  void close_connections(Lock& lock);
  PlanePeer* dialled(const std::string& where);

  const PlaneOptions options_;
  const process::UniqueFd wake_;

  mutable std::mutex mutex_;  // guards the members below
  mutable std::condition_variable changed_;
  std::uint64_t secret_;
  Listening listening_;
  std::list<PlanePeer> peers_;           // only the thread closes and removes them
  std::vector<WatchedProcess> watched_;  // only the thread removes them
  Stars stars_;
  std::string notice_;  // answer to ask()
  bool stop_ = false;

  std::thread thread_;
};

struct GroupWatch::Ends {
  std::shared_ptr<PlaneLoop> loop;
  std::shared_ptr<GroupStar> star;
  std::string own_address = {};
};

}  // namespace dynmo::elastic
