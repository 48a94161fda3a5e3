// SPDX-License-Identifier: Apache-2.0
#pragma once

// Mixture of experts: its keys, one table for a training and for a scenario.

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
  double bias_rate = 0.001;  // u, of kBias: what a step adds to or takes from an expert's bias
  MoeDrop drop = MoeDrop::kPosition;
  int expert_ranks = 8;  // R; must divide the experts. 1: all experts on one device, phi <= 1
  // Records of a training (RUN/records/rank-0.jsonl), whose counts take the place of those that are
  // drawn. "": none.
  std::string counts = {};
  // Exponent of Zipf's law, drawn uniformly for every layer. 0.05 to 0.35 over 8 experts is
  // phi = 1.06 to 1.5: the usual planning range is 1.1 to 1.6.
  double min_skew = 0.05;
  double max_skew = 0.35;
  double early_skew = 1;  // the exponent starts this much (relative) higher and settles ...
  std::int64_t settle_steps = 300;  // ... with this time constant: most change comes in 10^2 to
                                    // 10^3 steps
  double drift = 0.1;               // std of an expert's log popularity around Zipf's law ...
  std::int64_t drift_steps = 2000;  // ... which has changed wholly after this many settled steps
  // C = ceil(capacity_factor k T / E) assignments an expert, the rest dropped (their tokens pass by
  // on the residual path), so that skewed layers do less work. 0: dropless.
  double capacity_factor = 0;
  int sampled_micro_batches = 8;  // whose mean is the cost of a step, and largest its stash
};

[[nodiscard]] std::vector<SourceKey> keys_of(MoeOptions& options);
// kBadInput naming the key: a value outside its range, min_skew above max_skew, top_k
// above experts.
[[nodiscard]] Expected<void> check(const MoeOptions& options);

}  // namespace dynmo::dynamism
