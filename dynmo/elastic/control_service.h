// SPDX-License-Identifier: Apache-2.0
#pragma once

// The control endpoint of an elastic run, at its leader. `dynmo ctl` and processes that want to
// join connect to it. Their requests wait until the leader's training loop takes them, between two
// steps. Requests for status and settings are answered at once.

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
    std::filesystem::path run;                // folder of the run
    std::string address = "127.0.0.1";        // where it listens
    std::string group_address = "127.0.0.1";  // where the groups of the run meet
    Member leader;                            // leader's name for the user
    std::string config;                       // TOML, for newcomers
    // Called on the service's thread when a process joins.
    std::function<Build()> build;
    int first_member = 0;  // number of the first newcomer
    // Secret of the previous leader, or "" for a new one.
    std::string secret = {};
    int replicas = 1;  // number of processes that join together
  };
  // Listens. No client knows the endpoint before publish(). Fails with kBadInput.
  [[nodiscard]] static Expected<std::unique_ptr<ControlService>> open(Options options);
  ControlService(const ControlService&) = delete;
  ControlService& operator=(const ControlService&) = delete;
  // Tells waiting clients that the run has ended, and removes the files that it has published.
  ~ControlService();
  // Writes RUN/job.json and RUN/secret. Returns kBadInput if that fails. The caller may try again.
  [[nodiscard]] Expected<void> publish();
  // Returns the address and port where the service listens, as in job.json.
  [[nodiscard]] const JobFile& endpoint() const { return endpoint_; }
  // Hands over to the service of another rank, which leads now. From now on, clients that ask for
  // the status, or still wait at the end, are sent there.
  void hand_over(JobFile next);
  [[nodiscard]] const std::string& secret() const { return secret_; }
  [[nodiscard]] int next_member();

  // Returns whether a request waits for the training loop.
  [[nodiscard]] bool has_requests() const { return waiting_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::vector<ClientRequest> take();
  // Returns the processes that wait to join, a multiple of `replicas`. They wait until they are
  // admitted or refused, or disconnect.
  [[nodiscard]] std::vector<Newcomer> newcomers();
  void answer(process::ClientId client, const Reply& reply);
  // Gives a waiting process a place in the next group. Until that group is taken or given up,
  // missing() returns an error if an admitted process has disconnected.
  void admit(process::ClientId client, const Place& place);
  [[nodiscard]] std::optional<Error> missing();
  // Ends the admission, because the group is in force or never will be. The remaining newcomers may
  // ask again.
  void dismiss_admitted();
  void set_status(Json status);
  [[nodiscard]] std::optional<std::string> take_failure() { return server_->take_failure(); }

 private:
  struct Joining {
    std::vector<Newcomer> newcomers = {};
    std::optional<Error> missing = {};     // of an admitted process
    std::map<MemberId, int> numbers = {};  // of all newcomers so far, which may return
    int next_number = 0;
  };

  explicit ControlService(Options options);
  process::LineServer::Answer on_line(process::ClientId client, std::string_view line);
  process::LineServer::Answer on_join(process::ClientId client, const Request& request);
  void gone(process::ClientId client);
  void lose(process::ClientId client);    // of a client that has left, under the lock
  void forget(process::ClientId client);  // under the lock
  void note_waiting();                    // sets waiting_
  [[nodiscard]] Reply over() const;       // answer when another rank leads, or none

  Options options_;
  std::string secret_;
  JobFile endpoint_;
  bool published_ = false;
  std::atomic<bool> waiting_{false};
  std::mutex mutex_;  // guards the members below
  std::optional<JobFile> next_endpoint_;
  std::vector<ClientRequest> requests_;
  Joining joining_;
  std::vector<process::ClientId> present_;  // clients that wait for an answer
  Json status_;
  // Last, because its thread uses the members above.
  std::unique_ptr<process::LineServer> server_;
};

}  // namespace dynmo::elastic
