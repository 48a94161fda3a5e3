// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/moe/options.h"

namespace dynmo::dynamism {

std::vector<SourceKey> keys_of(MoeOptions& o) {
  return {
      {.name = "expert_ranks",
       .field = &o.expert_ranks,
       .allowed = between(1, 1e6),
       .help = "devices that share the experts of a layer; they divide the experts",
       .used_by = UsedBy::kLoad},
      {.name = "min_skew",
       .field = &o.min_skew,
       .allowed = between(0, 10),
       .help = "exponent of Zipf's law over the experts: smallest of a layer",
       .used_by = UsedBy::kLoad},
      {.name = "max_skew",
       .field = &o.max_skew,
       .allowed = between(0, 10),
       .help = "... and largest",
       .used_by = UsedBy::kLoad},
      {.name = "early_skew",
       .field = &o.early_skew,
       .allowed = between(0, 10),
       .help = "the exponent starts this much (relative) higher",
       .used_by = UsedBy::kLoad},
      {.name = "settle_steps",
       .field = &o.settle_steps,
       .allowed = between(1, 1e9),
       .help = "... and settles with this time constant",
       .used_by = UsedBy::kLoad},
      {.name = "drift",
       .field = &o.drift,
       .allowed = between(0, 10),
       .help = "std of an expert's log popularity",
       .used_by = UsedBy::kLoad},
      {.name = "drift_steps",
       .field = &o.drift_steps,
       .allowed = between(1, 1e9),
       .help = "... which has changed wholly after so many steps",
       .used_by = UsedBy::kLoad},
      {.name = "capacity_factor",
       .field = &o.capacity_factor,
       .allowed = between(0, 1e6),
       .help = "times the even share of an expert, the rest is dropped; 0: dropless"},
      {.name = "sampled_micro_batches",
       .field = &o.sampled_micro_batches,
       .allowed = between(1, 10000),
       .help = "whose mean is the cost of a step",
       .used_by = UsedBy::kLoad},
  };
}

Expected<void> check(const MoeOptions& options) {
  DYNMO_TRY(check_key_values("moe", options));
  if (options.min_skew <= options.max_skew) return {};
  return make_error(ErrorCode::kBadInput, "moe.min_skew is {}, wanted at most moe.max_skew, {}",
                    options.min_skew, options.max_skew);
}

}  // namespace dynmo::dynamism
