// SPDX-License-Identifier: Apache-2.0
#pragma once

// The control endpoint of an elastic run, at its leader: `dynmo ctl` and processes that want to
// become ranks connect to it. Their requests wait until the leader's training loop takes them,
// between two steps; requests for status and settings are answered at once.

#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/elastic/control_messages.h"
#include "dynmo/elastic/job_file.h"
#include "dynmo/elastic/size_changes.h"
#include "dynmo/process/line_server.h"

namespace dynmo::elastic {

class ControlService {
 public:
  struct Options {
    std::filesystem::path run;                // its folder
    std::string address = "127.0.0.1";        // where it listens
    std::string group_address = "127.0.0.1";  // where the groups of the run meet
    Member leader;                            // for people
    std::string config;                       // TOML, for who joins
    std::function<Build()> build;             // asked on the service's thread when somebody joins
    int first_member = 0;                     // number of the first that joins
    std::string secret = {};                  // that of the leader before; "": a new one
    int replicas = 1;                         // as many join at once
  };
  // Listens. Nobody knows where before publish(). kBadInput.
  [[nodiscard]] static Expected<std::unique_ptr<ControlService>> open(Options options);
  ControlService(const ControlService&) = delete;
  ControlService& operator=(const ControlService&) = delete;
  // Tells who waits that the run has ended, and removes the files that it has published.
  ~ControlService();
  // Writes RUN/job.json and RUN/secret. kBadInput where that fails; it may be tried again.
  [[nodiscard]] Expected<void> publish();
  // Where it listens, as job.json has it.
  [[nodiscard]] const JobFile& endpoint() const { return endpoint_; }
  // Another rank leads, and its service has taken this one's place: who asks for the status from
  // now on, or waits at the end, is told to ask there.
  void hand_over(JobFile next);
  [[nodiscard]] const std::string& secret() const { return secret_; }
  [[nodiscard]] int next_member();

  // Whether somebody waits for the training loop, which calls it.
  [[nodiscard]] bool has_requests() const { return waiting_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::vector<ClientRequest> take();
  // A multiple of `replicas`; they wait until they are admitted, refused or gone.
  [[nodiscard]] std::vector<Newcomer> newcomers();
  void answer(process::ClientId client, const Reply& reply);
  // A process that waits gets a place in a group that is to be. Until that group is taken or given
  // up it is watched: the error once one that was admitted has gone.
  void admit(process::ClientId client, const Place& place);
  [[nodiscard]] std::optional<Error> missing();
  // The group is in force, or never will be: then those that are left may ask again.
  void dismiss_admitted();
  void set_status(Json status);

 private:
  struct Numbers {
    std::map<MemberId, int> known;  // all that have come; one may come again
    int next = 0;
  };

  explicit ControlService(Options options);
  process::LineServer::Answer on_line(process::ClientId client, std::string_view line);
  process::LineServer::Answer on_join(process::ClientId client, const Request& request);
  void gone(process::ClientId client);
  void forget(process::ClientId client);  // under the lock
  void note_waiting();                    // sets waiting_
  [[nodiscard]] Reply over() const;       // what is said once another rank leads, or none

  Options options_;
  std::string secret_;
  JobFile endpoint_;
  bool published_ = false;
  std::atomic<bool> waiting_{false};
  std::mutex mutex_;  // guards what follows
  std::optional<JobFile> next_endpoint_;
  std::vector<ClientRequest> requests_;
  std::vector<Newcomer> newcomers_;
  std::optional<Error> missing_;  // one that was admitted
  Numbers numbers_;
  std::vector<process::ClientId> present_;  // clients that wait for an answer
  Json status_;
  std::unique_ptr<process::LineServer> server_;  // last: its thread uses the above
};

}  // namespace dynmo::elastic
