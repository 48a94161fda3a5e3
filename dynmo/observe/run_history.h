// SPDX-License-Identifier: Apache-2.0
#pragma once

// The history of a run is a fold over the facts of its steps, in order, and over its events. The
// leader folds them as they happen. A rank that became leader later, or resumes a run, reads the
// run's folder at the end (read_history). Both ways give the same numbers.

#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/core/traffic.h"
#include "dynmo/cost/layer_sample.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/observe/step_facts.h"
#include "dynmo/observe/traffic_log.h"
#include "dynmo/plan/plan.h"

namespace dynmo::observe {

struct StepEntry : StepFacts {
  std::int64_t step = 0;
  std::int64_t tokens = 0;
  // Set if runs are compared. They need much more memory than the other fields.
  std::vector<cost::LayerSample> layers = {};
  plan::Plan plan = {};
};
// Returns whether the step was measured. dynmo.torch does not measure a step with fewer
// micro-batches than the others: its time is NaN, and only its losses and moves count.
[[nodiscard]] bool is_measured(const StepEntry& step);

// The facts of a run's steps and events that its summary needs. Intentionally copyable. The size is
// bounded for any number of steps.
class RunHistory {
 public:
  static constexpr std::size_t kMaxSample = 4096;  // steps
  static constexpr std::size_t kMaxNewest = 10;

  struct Run {
    std::string name = {};
    int replicas = 1;
    bool elastic = false;  // its ranks may change
  };
  // The ranks of all replicas in a step. Those at work have layers.
  struct Ranks {
    int all = 0;
    int at_work = 0;
  };
  struct Validation {
    std::int64_t step = 0;
    double loss = 0;
    std::optional<double> generation_loss = {};  // where layers then decide otherwise
  };
  // The totals of events. Seconds are sums over all ranks.
  struct Totals {
    int checkpoints_written = 0;
    int checkpoints_failed = 0;
    int size_changes = 0;
    std::int64_t repeated_steps = 0;  // because of lost ranks
    int members = 0;                  // number of all members so far
    double changing_s = 0;            // between a group and the next one
    double working_s = 0;             // steps of ranks with layers
    double idle_s = 0;                // steps of ranks without
    double saved_s = 0;               // steps of ranks that the run began with and has released
  };

  RunHistory() = default;
  explicit RunHistory(Run run) : run_(std::move(run)) {}
  [[nodiscard]] static Ranks ranks_of(const plan::Plan& plan, int replicas);

  // Adds the next step.
  void add(StepEntry entry, const Ranks& ranks);
  // Adds an event (event_log.h). Ignores unknown kinds. Throws Json::exception if a field has
  // another type than in docs/formats.md.
  void add_event(std::string_view kind, std::int64_t step, const Json& event);
  void add_traffic(const TrafficInterval& interval);
  void set_sources(const Json& figures) { sources_ = figures; }  // of the newest step
  // Clears the newest steps. Call it if the next step to be added does not follow the last one.
  void forget_newest() { steps_.newest.clear(); }

  [[nodiscard]] const Run& run() const { return run_; }
  [[nodiscard]] std::int64_t count() const { return steps_.count; }
  // Returns all steps, or an even sample of them: from kMaxSample steps on every second, from twice
  // that number on every fourth, ...
  [[nodiscard]] const std::vector<StepEntry>& sample() const { return steps_.sample; }
  [[nodiscard]] const std::deque<StepEntry>& newest() const { return steps_.newest; }
  [[nodiscard]] double seconds() const { return steps_.seconds; }  // of measured steps
  [[nodiscard]] double tokens_per_s() const;
  [[nodiscard]] double newest_tokens_per_s() const;
  // Returns the facts of a summary: sums over all steps, and means over the sample.
  [[nodiscard]] StepFacts over_steps() const;
  [[nodiscard]] int moves() const { return steps_.moves; }
  [[nodiscard]] std::int64_t first_move() const { return steps_.first_move; }  // its step; -1: none
  // Returns the digest of the bits of all losses. Equal losses have equal digests.
  [[nodiscard]] std::string loss_digest() const { return steps_.losses.hex(); }
  [[nodiscard]] const std::optional<Validation>& validation() const { return validation_; }
  // Returns the largest error of the clocks in the trace, or nullopt if all ranks have one clock.
  [[nodiscard]] std::optional<double> clock_error_s() const { return clock_error_s_; }
  [[nodiscard]] const Totals& totals() const { return totals_; }
  // Returns the numbers of all lost ranks.
  [[nodiscard]] const std::set<int>& lost() const { return lost_; }
  [[nodiscard]] const Json& sources() const { return sources_; }
  [[nodiscard]] const TrafficRows& traffic() const { return traffic_; }
  [[nodiscard]] std::int64_t traffic_steps() const { return traffic_steps_; }

 private:
  void add_to_sample(StepEntry entry);
  void note_members(const Json& numbers);

  struct Steps {
    std::vector<StepEntry> sample = {};
    std::int64_t stride = 1;  // of the sample
    std::deque<StepEntry> newest = {};
    std::int64_t count = 0;
    std::int64_t tokens = 0;
    double seconds = 0;
    StepFacts sums = {};  // of the facts with OverSteps::kSum and kMax
    int first_ranks = 0;
    int moves = 0;
    std::int64_t first_move = -1;
    Digest losses = {};  // digest of the previous digest and the newest loss
  };

  Run run_;
  Steps steps_;
  std::optional<Validation> validation_;
  std::optional<double> clock_error_s_;
  Totals totals_;
  std::set<int> lost_;
  Json sources_ = Json::object();
  TrafficRows traffic_;
  std::int64_t traffic_steps_ = 0;
};

// Reads the history of the first `steps` steps from the folder. Each step counts once, by the last
// record of the lowest rank that has one. Steps without a record are omitted, and count() is then
// below `steps`. Reads the records of further ranks only while steps are missing. Takes about 200
// bytes a step. Returns kBadInput with file and line.
[[nodiscard]] Expected<RunHistory> read_history(const RunFolder& folder, RunHistory::Run run,
                                                std::int64_t steps);

}  // namespace dynmo::observe
