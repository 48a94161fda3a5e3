// SPDX-License-Identifier: Apache-2.0
#pragma once

// The state that only the leader of an elastic run has: the control endpoint, the releases whose
// hooks are called, the ranks that the launcher was asked for, and who waits for an answer. When
// another rank becomes the leader it goes on with what this one hands over.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/elastic/boundary_event.h"
#include "dynmo/elastic/control_service.h"
#include "dynmo/elastic/release_driver.h"
#include "dynmo/elastic/size_changes.h"

namespace dynmo::elastic {

inline constexpr std::chrono::milliseconds kLastHooks{20000};  // for hooks when the leader ends

[[nodiscard]] std::vector<int> numbers_of(const View& view);
[[nodiscard]] inline Reply done(std::string text) {
  return {.done = true, .text = std::move(text)};
}

// One thread calls, between two steps or while a group forms.
class Leader {
 public:
  struct Options {
    ControlService::Options service;
    ReleaseOptions releases;
  };
  // Opens the control endpoint, which nobody knows before publish(). `handover` is that of the
  // leader before; null: the run begins. kBadInput.
  [[nodiscard]] static Expected<std::unique_ptr<Leader>> open(Options options,
                                                              const Json& handover);
  // Writes the files by which clients find the endpoint. Where that fails, poll() tries it again.
  [[nodiscard]] Expected<void> publish();
  [[nodiscard]] const JobFile& endpoint() const { return service_->endpoint(); }

  // At a boundary. Whether a client waits for the training loop.
  [[nodiscard]] bool has_requests() const { return service_->has_requests(); }
  // Fills in what clients ask all ranks for; what the leader does alone is done.
  void take_requests(RankRequest& mine);
  // The results of hooks, of ranks that were started, and of files that could not be written.
  [[nodiscard]] BoundaryEvents poll();
  void answer(process::ClientId client, const Reply& reply) { service_->answer(client, reply); }
  // These clients are answered by answer_checkpoints, once no checkpoint is under way.
  void wait_for_checkpoint(const std::vector<process::ClientId>& clients);
  [[nodiscard]] bool awaits_checkpoint() const { return !wait_for_checkpoint_.empty(); }
  void answer_checkpoints(const Expected<void>& written);

  // For `dynmo ctl RUN status`: figures of the newest step; who is in the run, and with what.
  void set_step(const Json& figures);
  void set_group(const View& view, const plan::Plan& plan);

  // While a group forms: its newcomers get their places, and the error once one has gone.
  void admit(const SizeChange& change, const View& next, const Place& place);
  [[nodiscard]] std::optional<Error> missing() { return service_->missing(); }
  // The group is in force, or never will be.
  void dismiss_admitted() { service_->dismiss_admitted(); }
  // The members have changed; `line` tells whoever started ranks that they have joined.
  void note_change(const View& before, const View& now, int joined, const std::string& line);

  // For the next leader.
  [[nodiscard]] Json handover() const;
  // The next leader listens there and goes on with the handover: clients are sent to it, but for
  // the one that has asked for the change, which gets this reply.
  void retire(const JobFile& next, process::ClientId client = 0, const Reply& reply = {});
  // Calls the hooks of releases that none was called for yet, in so much time, or until `hurry`.
  // Any thread, while nothing else is called.
  [[nodiscard]] BoundaryEvents finish(std::chrono::milliseconds at_most,
                                      const std::function<bool()>& hurry = {});

 private:
  struct Growing {  // ranks that the launcher was asked for
    process::ClientId client = 0;
    int wanted = 0;
    int joined = 0;
    std::chrono::steady_clock::time_point until = {};
  };
  Leader(ReleaseOptions releases, int replicas)
      : replicas_(replicas), releases_(std::move(releases)) {}
  void grow(const ClientRequest& request);
  void give_up_growing();
  void try_releases_again(const ClientRequest& request);

  int replicas_;
  bool unpublished_ = false;  // the files could not be written
  Json status_ = Json::object();
  std::vector<process::ClientId> wait_for_checkpoint_;
  std::optional<Growing> growing_;
  ReleaseDriver releases_;
  std::unique_ptr<ControlService> service_;  // null once it has retired
};

}  // namespace dynmo::elastic
