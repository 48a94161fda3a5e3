// SPDX-License-Identifier: Apache-2.0
#pragma once

// The keys of mixture of depths, one table for a training and for a scenario.

#include <cstdint>
#include <optional>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/source_entry.h"
#include "dynmo/dynamism/source_key.h"

namespace dynmo::dynamism {

struct MixtureOfDepthsOptions {
  double capacity = 0.125;       // C / s, above 0; the paper's best
  std::int64_t every = 2;        // the last of `every` blocks is routed: 2 is every other block
  std::int64_t first_block = 0;  // blocks before this one are never routed
  double noise = 0.005;          // relative std of a layer's time between steps (the kernels')
};

[[nodiscard]] std::vector<SourceKey> keys_of(MixtureOfDepthsOptions& options);
// Checks the values. Returns kBadInput with a key outside its range.
[[nodiscard]] Expected<void> check(const MixtureOfDepthsOptions& options);
// Returns a reason if no block of the model is routed.
[[nodiscard]] std::optional<Idle> idle_in(const MixtureOfDepthsOptions& options,
                                          const TrainingSetting& setting);

// Returns whether a block is routed. Blocks are counted from 0.
[[nodiscard]] bool is_routed(const MixtureOfDepthsOptions& options, std::int64_t block);
// Returns C = max(1, round(capacity s)).
[[nodiscard]] std::int64_t routed_tokens(double capacity, std::int64_t sequence);
// Returns the width of the predictor's hidden layer: an eighth of the model's.
[[nodiscard]] std::int64_t predictor_size(std::int64_t hidden);

}  // namespace dynmo::dynamism
