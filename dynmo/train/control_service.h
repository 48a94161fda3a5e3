// SPDX-License-Identifier: Apache-2.0
#pragma once

// The door of an elastic run, at its leader: `dynmo ctl` and processes that want to become ranks
// come here. What they ask for waits until the leader's training loop takes it, between two steps;
// what they may know without it (status, settings) they hear at once.

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
#include "dynmo/process/line_server.h"

namespace dynmo::train {

// Something that is to happen between two steps.
struct Wish {
  elastic::RequestKind kind = elastic::RequestKind::kStop;
  process::ClientId client = 0;  // who hears what became of it; 0: nobody
  int ranks = 0;
  int member = 0;
};

// A process that may become a rank, and waits.
struct Standby {
  process::ClientId client = 0;
  elastic::Member member;
  bool admitted = false;  // it has a place in a group that is to be
};

class ControlService {
 public:
  struct Options {
    std::filesystem::path run;                // its folder
    std::string address = "127.0.0.1";        // where it listens
    std::string group_address = "127.0.0.1";  // where the groups of the run meet
    elastic::Member leader;                   // for people
    std::string config;                       // TOML, for who joins
    std::function<elastic::Build()> build;    // asked on the service's thread when somebody joins
    int first_member = 0;                     // number of the first that joins
    std::string secret = {};                  // that of the leader before; "": a new one
    int replicas = 1;                         // as many join at once
  };
  // Listens, and writes RUN/job.json and RUN/secret. kBadInput.
  [[nodiscard]] static Expected<std::unique_ptr<ControlService>> open(Options options);
  ControlService(const ControlService&) = delete;
  ControlService& operator=(const ControlService&) = delete;
  // Tells who waits that the run has ended, and removes the files.
  ~ControlService();
  // Where it listens, as job.json has it.
  [[nodiscard]] const elastic::JobFile& door() const { return door_; }
  // Another rank leads, and its service has taken this one's place: who waits is told to ask there.
  void hand_over(elastic::JobFile next) { next_door_ = std::move(next); }
  [[nodiscard]] const std::string& secret() const { return secret_; }
  [[nodiscard]] int next_member();

  // By the training loop. Whether somebody waits for it.
  [[nodiscard]] bool has_wishes() const { return waiting_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::vector<Wish> take();
  // A multiple of `replicas`; they stand by until they are admitted, refused or gone.
  [[nodiscard]] std::vector<Standby> standbys();
  void answer(process::ClientId client, const elastic::Reply& reply);
  // One that stands by gets a place in a group that is to be. Until that group is taken or given up
  // it is watched: the error once one that was admitted has gone.
  void admit(process::ClientId client, const elastic::Place& place);
  [[nodiscard]] std::optional<Error> missing();
  // The group is in force, or never will be: then those that are left may ask again.
  void dismiss_admitted();
  void set_status(Json status);

 private:
  explicit ControlService(Options options);
  process::LineServer::Answer hear(process::ClientId client, std::string_view line);
  process::LineServer::Answer hear_join(process::ClientId client, const elastic::Request& request);
  void gone(process::ClientId client);
  void forget(process::ClientId client);  // under the lock
  void note_waiting();                    // likewise

  Options options_;
  std::string secret_;
  elastic::JobFile door_;
  std::optional<elastic::JobFile> next_door_;
  std::atomic<bool> waiting_{false};
  std::mutex mutex_;  // guards what follows
  std::vector<Wish> wishes_;
  std::vector<Standby> standbys_;
  std::optional<Error> missing_;              // one that was admitted
  std::map<elastic::MemberId, int> numbers_;  // of all that have come; one may come again
  std::vector<process::ClientId> present_;    // clients that wait for an answer
  Json status_;
  int next_member_ = 0;
  std::unique_ptr<process::LineServer> server_;  // last: its thread uses the above
};

}  // namespace dynmo::train
