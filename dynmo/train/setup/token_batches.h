// SPDX-License-Identifier: Apache-2.0
#pragma once

// The micro-batches of a run, read from prepared token shards. They are a pure function of (seed,
// step, micro-batch). So every rank reads its own, and no batch is ever sent.

#include <cstdint>
#include <optional>
#include <string>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/data/blend.h"
#include "dynmo/runtime/engine.h"

namespace dynmo::train {

// Identifies the data of a run.
struct DataIdentity {
  std::string tokenizer = {};  // of a prepared folder (data::tokenizer_name); "" if not known
  std::string digest = {};     // of the tokens; if the shards have none, their number
};

class TokenBatches {
 public:
  // Opens the data. An emulated device has empty micro-batches. Returns kBadInput without a
  // data.path, and if it is neither a prepared folder nor token shards with data.vocabulary. Also
  // returns it if the tokens of training, or of data.validation_path, are fewer than a sequence. If
  // the validation tokens of a prepared folder are fewer, there is no validation (see note()). All
  // folders of a data.blend must have one tokenizer.
  [[nodiscard]] static Expected<TokenBatches> open(const config::Config& config);

  [[nodiscard]] std::int64_t vocabulary() const { return vocabulary_; }
  // Returns an identity that is known without reading the tokens, or an empty one if emulated.
  [[nodiscard]] const DataIdentity& identity() const { return identity_; }
  // Returns a digest of all data of training and validation (TokenShards::fingerprint), or "" if
  // emulated.
  [[nodiscard]] std::string fingerprint() const;
  // Returns whether train.validation_every asks for validation and there is data for it.
  [[nodiscard]] bool validates() const { return validation_.has_value(); }
  // Returns why validation was asked for but has no data, one line for the user, or "".
  [[nodiscard]] const std::string& note() const { return note_; }
  // Returns a micro-batch of training. Its sample index is (step x micro-batches of a step +
  // micro-batch) x micro-batch size + row.
  [[nodiscard]] runtime::MicroBatch training(std::int64_t step, MicroBatchId micro_batch) const;
  // Returns a held-out micro-batch, the same for the same `step` at every validation. Requires
  // validates().
  [[nodiscard]] runtime::MicroBatch validation(std::int64_t step, MicroBatchId micro_batch) const;

 private:
  TokenBatches(std::optional<data::BlendedSampler> training,
               std::optional<data::BlendedSampler> validation, const config::Config& config,
               std::int64_t vocabulary);
  [[nodiscard]] runtime::MicroBatch read(const data::BlendedSampler& sampler, std::int64_t step,
                                         MicroBatchId id) const;

  std::optional<data::BlendedSampler> training_;  // none: emulated
  std::optional<data::BlendedSampler> validation_;
  std::string note_;
  DataIdentity identity_;
  std::int64_t micro_batches_;  // of a step
  std::int64_t rows_;
  std::int64_t vocabulary_;
};

}  // namespace dynmo::train
