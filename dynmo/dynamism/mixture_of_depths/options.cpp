// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/mixture_of_depths/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "dynmo/core/check.h"

namespace dynmo::dynamism {

std::vector<SourceKey> keys_of(MixtureOfDepthsOptions& o) {
  return {
      {.name = "capacity",
       .field = &o.capacity,
       .allowed = above_to(0, 1),
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

std::optional<Idle> idle_in(const MixtureOfDepthsOptions& options, const TrainingSetting& setting) {
  for (std::int64_t block = 0; block < setting.blocks; ++block) {
    if (is_routed(options, block)) return {};
  }
  if (setting.blocks == 0) return {};
  const bool first = options.first_block >= setting.blocks ||
                     (options.first_block > 0 && options.every <= setting.blocks);
  return Idle{.given = first
                           ? fmt::format("mixture_of_depths.first_block is {}", options.first_block)
                           : fmt::format("mixture_of_depths.every is {}", options.every),
              .nothing = "no block would choose tokens",
              .why = fmt::format("the model has {} blocks", setting.blocks),
              .wanted = first ? "an earlier block" : "a smaller number"};
}

bool is_routed(const MixtureOfDepthsOptions& options, std::int64_t block) {
  return block >= options.first_block && (block + 1) % options.every == 0;
}

std::int64_t routed_tokens(double capacity, std::int64_t sequence) {
  DYNMO_CHECK(capacity >= 0 && capacity <= 1 && sequence >= 1,
              "a capacity of 0 to 1 and a sequence, got {}, {}", capacity, sequence);
  return std::max<std::int64_t>(1, std::llround(capacity * static_cast<double>(sequence)));
}

std::int64_t predictor_size(std::int64_t hidden) { return std::max<std::int64_t>(1, hidden / 8); }

}  // namespace dynmo::dynamism
