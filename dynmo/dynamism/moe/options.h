// SPDX-License-Identifier: Apache-2.0
#pragma once

// The keys of mixture of experts, one table for a training and for a scenario.

#include <cstdint>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/moe/routing.h"
#include "dynmo/dynamism/source_key.h"

namespace dynmo::dynamism {

struct MoeOptions {
  int experts = 8;        // E, of every block
  int top_k = 2;          // k, of a token
  int expert_hidden = 0;  // intermediate width of an expert; 0: that of the model
  MoeRouter router = MoeRouter::kTopK;
  double aux_loss = 0.01;    // alpha, of kTopK (Fedus et al., 2021)
  double z_loss = 0;         // factor (Zoph et al., 2022: 0.001)
  double bias_rate = 0.001;  // u, of kBias: change of an expert's bias in a step
  MoeDrop drop = MoeDrop::kPosition;
  int expert_ranks = 8;  // R; must divide the experts. 1: all experts on one device, phi <= 1
  // Records of a training (RUN/records/rank-0.jsonl), whose counts replace the drawn ones. "":
  // none.
  std::string counts = {};
  // Exponent of Zipf's law, drawn uniformly for every layer. 0.05 to 0.35 over 8 experts is phi =
  // 1.06 to 1.5. The usual planning range is 1.1 to 1.6.
  double min_skew = 0.05;
  double max_skew = 0.35;
  double early_skew = 1;  // relative increase of the exponent at the start
  // Time constant of `early_skew`. Most change comes in 10^2 to 10^3 steps.
  std::int64_t settle_steps = 300;
  double drift = 0.1;               // std of an expert's log popularity around Zipf's law
  std::int64_t drift_steps = 2000;  // settled steps after which that has changed completely
  // Limits an expert to C = ceil(capacity_factor k T / E) assignments. The rest is dropped: their
  // tokens skip it on the residual path. So skewed layers do less work. 0: dropless.
  double capacity_factor = 0;
  int sampled_micro_batches = 8;  // their mean is the cost of a step, and their largest its stash
};

[[nodiscard]] std::vector<SourceKey> keys_of(MoeOptions& options);
// Checks the values. Returns kBadInput with a key outside its range, min_skew above max_skew, or
// top_k above experts.
[[nodiscard]] Expected<void> check(const MoeOptions& options);

}  // namespace dynmo::dynamism
