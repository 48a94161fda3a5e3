// SPDX-License-Identifier: Apache-2.0
#pragma once

// The micro-batches of a run, read from prepared token shards: a pure function of (seed, step,
// micro-batch), so every rank reads its own and no batch is ever sent.

#include <cstdint>
#include <optional>
#include <string>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/data/sampler.h"
#include "dynmo/runtime/engine.h"

namespace dynmo::train {

// Tells the data of one run from those of another.
struct DataIdentity {
  std::string tokenizer = {};  // of a prepared folder (data::tokenizer_name); "" where not known
  std::string digest = {};     // of the tokens; of shards that do not tell it, how many there are
};

class TokenBatches {
 public:
  // Empty micro-batches where the device is emulated. kBadInput: no data.path, neither a prepared
  // folder nor token shards with data.vocabulary, fewer tokens than a sequence (validation: only of
  // data.validation_path; a prepared folder with fewer is not validated on, see note()).
  [[nodiscard]] static Expected<TokenBatches> open(const config::Config& config);

  [[nodiscard]] std::int64_t vocabulary() const { return vocabulary_; }
  // Known without reading the tokens; empty where emulated.
  [[nodiscard]] const DataIdentity& identity() const { return identity_; }
  // Identifies all that is trained and validated on (TokenShards::fingerprint); "" where emulated.
  [[nodiscard]] std::string fingerprint() const;
  // Whether train.validation_every asks for validation and there is data for it.
  [[nodiscard]] bool validates() const { return validation_.has_value(); }
  // Why there is none although it is asked for, one line for people; else "".
  [[nodiscard]] const std::string& note() const { return note_; }
  // Global sample index: (step x micro-batches of a step + micro-batch) x micro-batch size + row.
  [[nodiscard]] runtime::MicroBatch training(std::int64_t step, MicroBatchId micro_batch) const;
  // Held-out data: the same micro-batches for the same `step` at every validation.
  // Requires validates().
  [[nodiscard]] runtime::MicroBatch validation(std::int64_t step, MicroBatchId micro_batch) const;

 private:
  TokenBatches(std::optional<data::Sampler> training, std::optional<data::Sampler> validation,
               const config::Config& config, std::int64_t vocabulary);
  [[nodiscard]] runtime::MicroBatch read(const data::Sampler& sampler, std::int64_t step,
                                         MicroBatchId id) const;

  std::optional<data::Sampler> training_;  // none: emulated
  std::optional<data::Sampler> validation_;
  std::string note_;
  DataIdentity identity_;
  std::int64_t micro_batches_;  // of a step
  std::int64_t rows_;
  std::int64_t vocabulary_;
};

}  // namespace dynmo::train
