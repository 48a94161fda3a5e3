// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/sparse_attention/options.h"

namespace dynmo::dynamism {

std::vector<SourceKey> keys_of(SparseAttentionOptions& o) {
  return {
      {.name = "buckets",
       .field = &o.buckets,
       .allowed = between(1, 1e6),
       .help = "that queries and keys are hashed into"},
      {.name = "min_skew",
       .field = &o.min_skew,
       .allowed = between(0, 1),
       .help = "log of the skew of the buckets, to base buckets: smallest of a layer",
       .used_by = UsedBy::kLoad},
      {.name = "max_skew",
       .field = &o.max_skew,
       .allowed = between(0, 1),
       .help = "... and largest",
       .used_by = UsedBy::kLoad},
      {.name = "drift",
       .field = &o.drift,
       .allowed = between(0, 10),
       .help = "std of a layer's skew",
       .used_by = UsedBy::kLoad},
      {.name = "drift_steps",
       .field = &o.drift_steps,
       .allowed = between(1, 1e9),
       .help = "... which has changed wholly after so many steps",
       .used_by = UsedBy::kLoad},
      {.name = "micro_batch_noise",
       .field = &o.micro_batch_noise,
       .allowed = between(0, 10),
       .help = "std of the skew between micro-batches",
       .used_by = UsedBy::kLoad},
      {.name = "sampled_micro_batches",
       .field = &o.sampled_micro_batches,
       .allowed = between(1, 10000),
       .help = "whose mean is the cost of a step",
       .used_by = UsedBy::kLoad},
      {.name = "block",
       .field = &o.block,
       .allowed = between(0, 1e6),
       .help = "edge of the kernel's tiles"},
  };
}

Expected<void> check(const SparseAttentionOptions& options) {
  DYNMO_TRY(check_key_values("sparse_attention", options));
  if (options.min_skew <= options.max_skew) return {};
  return make_error(ErrorCode::kBadInput,
                    "sparse_attention.min_skew is {}, wanted at most sparse_attention.max_skew, {}",
                    options.min_skew, options.max_skew);
}

}  // namespace dynmo::dynamism
