// SPDX-License-Identifier: Apache-2.0
#pragma once

// A whole elastic training whose ranks are threads: it is told to pack, to drain and to take in
// ranks as `dynmo ctl` and `dynmo train --join` tell it, over its own socket, at drawn steps. What
// it leaves behind is held against a twin whose ranks never change.

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/elastic/job_file.h"
#include "dynmo/process/line_server.h"
#include "dynmo/train/setup/options.h"
#include "tests/train/elastic_hub.h"

namespace dynmo::train::testing {

constexpr int kVocabulary = 61;  // of the tokens of these trainings

// An order to a run between two steps.
struct Order {
  // kCheckpoint is the last one; kCheckpointAndDrain are two at once. kRefusedSignal changes
  // nothing when it comes; kAwait asks for nothing and waits for a change that the run makes by
  // itself.
  enum class Kind {
    kPack,
    kDrain,
    kSignal,
    kRefusedSignal,
    kAwait,
    kJoin,
    kFailToJoin,
    kCheckpoint,
    kCheckpointAndDrain
  };
  Kind kind = Kind::kPack;
  int ranks =
      0;  // kPack: of a replica; kJoin: as many come, in each replica; kAwait: all that are left
  int member = 0;   // of drains and signals
  int message = 0;  // kFailToJoin: one comes, and fails at this message that it sends if it has not
                    // joined by then
};
// The next one, by the numbers of the members; nullopt: no more.
using NextOrder = std::function<std::optional<Order>(const std::vector<int>& members)>;

struct ElasticCase {
  TrainOptions options;
  int ranks = 1;  // all that the run starts with
  std::uint64_t seed = 1;
  int min_gap = 1;  // steps from one change to the next order
  int max_gap = 3;
  NextOrder next = {};
  std::function<void(int changes)> settled = [](int) {};  // after each change, between two steps
  // Ranks may be lost, in which there are no orders: called for each rank before its thread begins,
  // and between two steps, where so many are done, on the thread of the rank that leads.
  std::function<void(HubGroups&)> watch = {};
  std::function<void(std::int64_t done, class ElasticRun&)> between = {};
};

class ElasticRun {
 public:
  explicit ElasticRun(ElasticCase what) : case_(std::move(what)), rng_(mix_key({case_.seed, 7})) {}

  // To its end: the first error of a rank or of an order.
  [[nodiscard]] Expected<void> run();
  [[nodiscard]] int changes() const { return changes_; }
  // Ranks that have failed to join.
  [[nodiscard]] int failed() const { return failed_; }
  // Whether the run was long enough for all orders.
  [[nodiscard]] bool gave_all() const { return ended_; }
  // A rank comes, on top of all orders.
  void add_newcomer();
  // The end of each rank, in the order in which they came.
  struct Ended {
    bool lost = false;     // as the test wanted
    bool torn = false;     // HubGroups::is_torn
    bool gave_up = false;  // a newcomer that never was a rank
    Expected<void> done;
  };
  [[nodiscard]] std::vector<Ended> ended() const;
  // Returns all that was reported and asked for, for messages of failed tests.
  [[nodiscard]] const std::string& story() const { return story_; }

 private:
  struct Thread {
    std::unique_ptr<HubGroups> groups;
    Expected<void> done;
    std::atomic<bool> stands_by{false};  // or was refused
    std::atomic<bool> ended{false};
    std::atomic<bool> joined{false};
    std::optional<int> fails_at = {};  // a message
    bool may_fail = false;             // before it has joined
    bool gave_up = false;
    std::jthread thread;
  };
  Thread& add_thread();
  Thread& add_rank();
  void start(Thread& thread, std::function<Expected<void>()> work);
  Expected<void> join(Thread& thread);
  void boundary();  // on the thread of the rank that leads
  Expected<void> follow();
  Expected<void> give(const Order& order);
  Expected<process::LineClient> ask(const elastic::Request& request);
  Expected<Json> status();
  void reap();
  void fail(const Error& why);

  ElasticCase case_;
  Rng rng_;
  Hub hub_;
  std::mutex mutex_;  // guards the list's shape and the failure
  std::list<Thread> threads_;
  std::optional<Error> failure_;
  std::vector<process::LineClient> waiting_;  // clients who are to hear of what is under way
  std::string story_;
  Reporter reporter_;
  int wanted_ = 0;  // ranks, once the change under way is done
  int changes_ = 0;
  int failed_ = 0;
  int left_ = 0;               // steps until the next order
  Thread* failing_ = nullptr;  // that comes now
  bool under_way_ = false;
  bool ended_ = false;  // no more orders
  elastic::Build build_;
  std::atomic<int> next_id_{1};
};

// The same training on ranks that never change.
[[nodiscard]] Expected<void> train_twin(const TrainOptions& options, int ranks);

// Returns the losses that a rank has recorded.
[[nodiscard]] std::vector<double> losses_of(const std::filesystem::path& run, int rank);

// The outputs of a run must be the twin's: every loss, once each by those who were members then;
// every checkpoint. `first` are the ranks that it started with.
void expect_as_twin(const std::filesystem::path& run, const std::filesystem::path& twin, int first,
                    int changes);

// The same of a run that has lost ranks: steps may have run again, and of checkpoints that were
// being written at a loss at most `unfinished` are missing.
void expect_as_twin_after_losses(const std::filesystem::path& run,
                                 const std::filesystem::path& twin, int unfinished);

// Writes a token shard of 4000 drawn tokens.
void write_tokens(const std::filesystem::path& prefix, int vocabulary);

}  // namespace dynmo::train::testing
