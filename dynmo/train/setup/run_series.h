// SPDX-License-Identifier: Apache-2.0
#pragma once

// A run series is the history of a run, step by step, on one rank: sums over all steps, the newest
// steps, and a sample of the steps that stays bounded however long the run is.

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/layer_sample.h"
#include "dynmo/observe/step_facts.h"
#include "dynmo/observe/summary.h"
#include "dynmo/plan/plan.h"
#include "dynmo/runtime/step_report.h"
#include "dynmo/transport/traffic.h"

namespace dynmo::train {

struct StepEntry : observe::StepFacts {
  std::int64_t step = 0;
  // Kept::kCosts only.
  std::vector<cost::LayerSample> layers = {};
  plan::Plan plan = {};
};

// The parts of a step that are kept: its layers' times and its plan are needed where runs are
// compared, and take much more room than the rest.
enum class Kept { kNumbers, kCosts };

class RunSeries {
 public:
  static constexpr std::size_t kMaxSample = 4096;  // steps
  static constexpr std::size_t kMaxNewest = 10;

  explicit RunSeries(std::string run_name = "", Kept kept = Kept::kNumbers);

  void add(const runtime::StepReport& report, const plan::Plan& plan);

  [[nodiscard]] std::int64_t count() const { return count_; }
  // All steps; of more than kMaxSample every second, of more than twice as many every fourth, ...
  [[nodiscard]] const std::vector<StepEntry>& sample() const { return sample_; }
  [[nodiscard]] const std::deque<StepEntry>& newest() const { return newest_; }
  [[nodiscard]] double seconds() const { return seconds_; }  // all steps
  [[nodiscard]] double tokens_per_s() const;
  // Returns the facts of a summary: `sums`, and means over the sample.
  [[nodiscard]] observe::StepFacts over_steps() const;
  [[nodiscard]] int moves() const { return moves_; }
  [[nodiscard]] std::int64_t first_move() const { return first_move_; }  // its step; -1: none
  // Over the bits of all losses: equal numbers, equal digest.
  [[nodiscard]] std::string loss_digest() const { return losses_.hex(); }

  std::string name;
  std::int64_t tokens_per_step = 0;
  int replicas = 1;
  observe::StepFacts sums = {};  // over all steps, of the facts with OverSteps::kSum
  std::vector<std::pair<std::int64_t, double>> validation = {};  // step, loss
  std::optional<double> generation_loss = {};  // of the newest, where layers then decide otherwise
  Json sources = Json::object();               // their figures of the newest step
  int checkpoints_written = 0;
  int checkpoints_failed = 0;
  std::vector<observe::TrafficRow> traffic = {};  // of all steps, once the run is over
  // The groups of a run that changes its size: seconds of all its ranks, by what they did.
  double working_rank_s = 0;  // steps of ranks with layers
  double idle_rank_s = 0;     // steps of ranks without
  double saved_rank_s = 0;    // steps of ranks that the run began with and has released
  double changing_rank_s = 0;
  int size_changes = 0;
  int first_ranks = 0;              // of the first group
  int losses = 0;                   // of ranks, that the run has survived
  std::int64_t repeated_steps = 0;  // because of them
  int members = 0;                  // numbers of all ranks are below it; 0: they do not change

  // Adds moves that no step's report tells of.
  void add_move(int moves, int layers, Bytes bytes, double seconds) {
    moves_ += moves;
    sums.moved_layers += layers;
    sums.moved_bytes += bytes;
    sums.migrate_s += seconds;
  }
  // All of it, for a rank that goes on with it in the place of this one; without what Kept::kCosts
  // keeps. kInternal for anything but what to_json() has made.
  [[nodiscard]] Json to_json() const;
  [[nodiscard]] Expected<void> restore(const Json& json);

  // Adds that of one group, whose ranks have these numbers for people; none: their own.
  void add_traffic(const transport::Traffic& group, const std::vector<int>& numbers);

 private:
  void add_to_sample(StepEntry entry);

  Kept kept_;
  std::vector<StepEntry> sample_;
  std::int64_t stride_ = 1;  // of the sample
  std::deque<StepEntry> newest_;
  std::int64_t count_ = 0;
  double seconds_ = 0;
  int moves_ = 0;
  std::int64_t first_move_ = -1;
  Digest losses_;  // of the digest before and the next loss, so that another rank can go on with it
};

}  // namespace dynmo::train
