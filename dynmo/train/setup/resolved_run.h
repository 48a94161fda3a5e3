// SPDX-License-Identifier: Apache-2.0
#pragma once

// A training before its first step. The options of a user become valid ones, and these become a run
// with its data and model open. Each step has one function, so the type of a value says what was
// checked.

#include <span>
#include <string>
#include <utility>

#include "dynmo/core/expected.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/train/setup/run_model.h"
#include "dynmo/train/setup/token_batches.h"

namespace dynmo::train {

// Options with a valid config. Only validated() makes them.
class ValidOptions {
 public:
  [[nodiscard]] const TrainOptions& options() const { return options_; }
  [[nodiscard]] const config::Config& config() const { return options_.config; }
  void use(TrainOptions::RankDevice device) { options_.rank_device = std::move(device); }

 private:
  friend Expected<ValidOptions> validated(TrainOptions options);
  friend class ResolvedRun;
  explicit ValidOptions(TrainOptions options) : options_(std::move(options)) {}

  TrainOptions options_;
};

// Checks the config. A training calls config::validate() only here. Returns kBadInput if the config
// is not valid.
[[nodiscard]] Expected<ValidOptions> validated(TrainOptions options);

// Valid options with their data and model. Only resolve() makes one, once in a process.
class ResolvedRun : public ValidOptions {
 public:
  [[nodiscard]] const TokenBatches& batches() const { return batches_; }
  [[nodiscard]] const RunModel& model() const { return model_; }
  // Returns the micro-batches of training. `this` outlives the result.
  [[nodiscard]] runtime::Pipeline::Batches training() const {
    return [this](std::int64_t step, MicroBatchId id) { return batches_.training(step, id); };
  }
  // Sets keys that shape no layers, such as measured ones, and checks the config again. Returns
  // kBadInput if the config is not valid.
  [[nodiscard]] Expected<void> set(std::span<const std::string> settings);
  // Returns the same training on the same data, without its sources of dynamism.
  [[nodiscard]] Expected<ResolvedRun> dense() const;

 private:
  friend Expected<ResolvedRun> resolve(const ValidOptions& options);
  ResolvedRun(ValidOptions options, TokenBatches batches, RunModel model)
      : ValidOptions(std::move(options)), batches_(std::move(batches)), model_(std::move(model)) {}

  TokenBatches batches_;
  RunModel model_;
};

// Opens data and model. Returns kBadInput as TokenBatches::open and make_model do.
[[nodiscard]] Expected<ResolvedRun> resolve(const ValidOptions& options);

// Like resolve(), and also checks what can be checked before a rank starts. That is names, the
// checkpoint to resume from, and ranks (of a replica) against layers. Returns kBadInput if a check
// fails.
[[nodiscard]] Expected<ResolvedRun> resolve_for(const ValidOptions& options, int ranks);

// Checks whether this host has the memory for the states of all layers of all replicas. Call it if
// all ranks run on this host. Returns kBadInput if the memory does not suffice.
[[nodiscard]] Expected<void> check_host_memory(const ResolvedRun& run);

}  // namespace dynmo::train
