// SPDX-License-Identifier: Apache-2.0
#pragma once

// The state that only the leader of an elastic run has. It has the control endpoint, the releases
// whose hooks are called, the ranks requested from the launcher, and the waiting clients. A leader
// hands its state over to the next one.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/elastic/control_messages.h"
#include "dynmo/elastic/control_service.h"
#include "dynmo/elastic/release_driver.h"
#include "dynmo/elastic/size_changes.h"
#include "dynmo/process/line_server.h"

namespace dynmo::elastic {

// An event of an elastic run between two steps, as a value. The code that makes a change returns
// such values. The run prints their lines, logs them and answers clients.
struct BoundaryEvent {
  std::string kind = {};         // in the event log (observe/event_log.h); "" if not logged
  std::string line = {};         // for the user; "" if not printed
  Json json = nullptr;           // fields of the log entry after kind and step
  process::ClientId client = 0;  // client that gets `reply`; 0: none
  Reply reply = {};              // to the client
};
using BoundaryEvents = std::vector<BoundaryEvent>;

inline constexpr std::chrono::milliseconds kLastHooks{20000};  // for hooks when the leader ends

[[nodiscard]] std::vector<int> numbers_of(const View& view);
[[nodiscard]] inline Reply done(std::string text) {
  return {.done = true, .text = std::move(text)};
}

// The leader's state. One thread calls, between two steps or while a group forms.
class Leader {
 public:
  struct Options {
    ControlService::Options service;
    ReleaseOptions releases;
  };
  // Opens the control endpoint, which no client knows before publish(). `handover` comes from the
  // previous leader, or is null if the run begins. Fails with kBadInput.
  [[nodiscard]] static Expected<std::unique_ptr<Leader>> open(Options options,
                                                              const Json& handover);
  // Writes the files by which clients find the endpoint. If that fails, poll() tries again.
  [[nodiscard]] Expected<void> publish();
  [[nodiscard]] const JobFile& endpoint() const { return service_->endpoint(); }

  // Returns whether a client waits for the training loop. Called at a boundary.
  [[nodiscard]] bool has_requests() const { return service_->has_requests(); }
  // Adds to `mine` the requests of clients that concern all ranks. Carries out the others.
  void take_requests(RankRequest& mine);
  // Returns the news of hooks, of ranks that were started, of files that could not be written,
  // and of clients that could not be served.
  [[nodiscard]] BoundaryEvents poll(Hooks next = Hooks::kCall);
  // Returns whether a hook runs. The next leader could not know its outcome.
  [[nodiscard]] bool runs_hook() const { return releases_->runs_hook(); }
  // Stops a hook that has run for kLastHooks, because this process must leave soon.
  void hurry_hook() { releases_->limit_hook(kLastHooks); }
  void answer(process::ClientId client, const Reply& reply) { service_->answer(client, reply); }
  // Adds clients that wait for a checkpoint, which answer_checkpoints() answers.
  void wait_for_checkpoint(const std::vector<process::ClientId>& clients);
  [[nodiscard]] bool awaits_checkpoint() const { return !wait_for_checkpoint_.empty(); }
  void answer_checkpoints(const Expected<void>& written);

  // Sets what `dynmo ctl RUN status` shows: figures of the newest step, members and their layers.
  void set_step(const Json& figures);
  void set_group(const View& view, const plan::Plan& plan);

  // Gives newcomers their places while a group forms. missing() returns an error if one has
  // disconnected.
  void admit(const SizeChange& change, const View& next, const Place& place);
  [[nodiscard]] std::optional<Error> missing() { return service_->missing(); }
  // Ends the admission, because the group is in force or never will be.
  void dismiss_admitted() { service_->dismiss_admitted(); }
  // Notes that the members have changed. `line` tells a client that started ranks that they have
  // joined.
  void note_change(const View& before, const View& now, int joined, const std::string& line);

  // Returns how many ranks that were started ended before they had joined, since the last call, for
  // a reason that has passed. Ranks that a client requested are not counted.
  [[nodiscard]] int take_failed_starts() { return std::exchange(failed_starts_, 0); }

  [[nodiscard]] Json handover() const;
  // Ends this leader. The next one listens at `next` and has the handover(), and clients are sent
  // there. Only the client that requested the change gets `reply`.
  void retire(const JobFile& next, process::ClientId client = 0, const Reply& reply = {});
  // Takes the releases of this process's leader object before, with the hook that runs. They
  // replace those of the handover.
  void take_releases(Leader& before) { std::swap(releases_, before.releases_); }
  // Calls the hooks of releases that have had no call yet, until `at_most` has passed or `hurry`
  // returns true. Any thread may call it while no other function runs.
  [[nodiscard]] BoundaryEvents finish(std::chrono::milliseconds at_most,
                                      const std::function<bool()>& hurry = {});

 private:
  struct Growing {  // ranks requested from the launcher
    process::ClientId client = 0;
    int wanted = 0;
    int joined = 0;
    std::chrono::steady_clock::time_point until = {};
  };
  Leader(ReleaseOptions releases, int replicas)
      : replicas_(replicas), releases_(std::make_unique<ReleaseDriver>(std::move(releases))) {}
  void grow(const ClientRequest& request);
  void give_up_growing();
  void try_releases_again(const ClientRequest& request);

  int replicas_;
  bool unpublished_ = false;  // files could not be written
  Json status_ = Json::object();
  std::vector<process::ClientId> wait_for_checkpoint_;
  std::optional<Growing> growing_;
  int failed_starts_ = 0;
  std::unique_ptr<ReleaseDriver> releases_;
  std::unique_ptr<ControlService> service_;  // null after retire()
};

}  // namespace dynmo::elastic
