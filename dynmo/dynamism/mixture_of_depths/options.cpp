// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/mixture_of_depths/options.h"

namespace dynmo::dynamism {

std::vector<SourceKey> keys_of(MixtureOfDepthsOptions& o) {
  return {
      {.name = "capacity",
       .field = &o.capacity,
       .allowed = between(0, 1),
       .help = "share of the tokens that a routed block works on"},
      {.name = "every",
       .field = &o.every,
       .allowed = between(1, 1e6),
       .help = "of so many blocks the last is routed"},
      {.name = "first_block",
       .field = &o.first_block,
       .allowed = between(0, 1e6),
       .help = "blocks before it are never routed"},
      {.name = "noise",
       .field = &o.noise,
       .allowed = between(0, 0.2),
       .help = "relative std of a layer's time between steps",
       .used_by = UsedBy::kLoad},
  };
}

Expected<void> check(const MixtureOfDepthsOptions& options) {
  return check_key_values("mixture_of_depths", options);
}

}  // namespace dynmo::dynamism
