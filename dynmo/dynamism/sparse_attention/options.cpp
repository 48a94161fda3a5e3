// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/sparse_attention/options.h"

#include <array>
#include <string_view>

#include "dynmo/core/device_names.h"
#include "dynmo/core/effects.h"

namespace dynmo::dynamism {
namespace {

constexpr std::array<std::string_view, 2> kSparseRuleNames = {"hash", "drop"};

}  // namespace

std::vector<SourceKey> keys_of(SparseAttentionOptions& o) {
  const ActsIf hashes = when("rule", Names{"hash"});
  return {
      {.name = "rule",
       .field = toml_choice(&o.rule, kSparseRuleNames),
       .allowed = {},
       .help = "which pairs stay: of equal hashes, or of what is not dropped"},
      {.name = "buckets",
       .field = &o.buckets,
       .allowed = between(1, 1e6),
       .help = "that tokens are hashed into; 1 or even",
       .acts_if = {hashes}},
      {.name = "dropped",
       .field = &o.dropped,
       .allowed = from_below(0, 1),
       .help = "share of the queries, and of the keys, that a head leaves out",
       .acts_if = {when("rule", Names{"drop"})}},
      {.name = "min_skew",
       .field = &o.min_skew,
       .allowed = between(0, 1),
       .help = "log of the skew of the buckets, to base buckets: smallest of a layer",
       .used_by = UsedBy::kLoad,
       .acts_if = {hashes}},
      {.name = "max_skew",
       .field = &o.max_skew,
       .allowed = between(0, 1),
       .help = "... and largest",
       .used_by = UsedBy::kLoad,
       .acts_if = {hashes}},
      {.name = "drift",
       .field = &o.drift,
       .allowed = between(0, 10),
       .help = "std of a layer's skew",
       .used_by = UsedBy::kLoad,
       .acts_if = {hashes}},
      {.name = "drift_steps",
       .field = &o.drift_steps,
       .allowed = between(1, 1e9),
       .help = "... which has changed wholly after so many steps",
       .used_by = UsedBy::kLoad,
       .acts_if = {hashes, when("drift", above(0), "a sparse_attention.drift above 0")}},
      {.name = "micro_batch_noise",
       .field = &o.micro_batch_noise,
       .allowed = between(0, 10),
       .help = "std of the skew between micro-batches",
       .used_by = UsedBy::kLoad,
       .acts_if = {hashes}},
      {.name = "sampled_micro_batches",
       .field = &o.sampled_micro_batches,
       .allowed = between(1, 10000),
       .help = "whose mean is the cost of a step",
       .used_by = UsedBy::kLoad,
       .acts_if = {hashes}},
      {.name = "block",
       .field = &o.block,
       .allowed = between(0, 1e6),
       .help = "edge of the kernel's tiles",
       .used_by = UsedBy::kLoad},
  };
}

Expected<void> check(const SparseAttentionOptions& options) {
  DYNMO_TRY(check_key_values("sparse_attention", options));
  if (options.buckets > 1 && options.buckets % 2 != 0) {
    return make_error(ErrorCode::kBadInput,
                      "sparse_attention.buckets is {}, wanted 1 or an even number, such as {}: a "
                      "direction and its opposite are a bucket each",
                      options.buckets, options.buckets + 1);
  }
  if (options.min_skew <= options.max_skew) return {};
  return make_error(ErrorCode::kBadInput,
                    "sparse_attention.min_skew is {}, wanted at most sparse_attention.max_skew, {}",
                    options.min_skew, options.max_skew);
}

Expected<void> check_training(const SparseAttentionOptions& options,
                              const TrainingSetting& setting) {
  if (options.rule != SparseRule::kDrop || !is_device_name(setting.device)) return {};
  return make_error(ErrorCode::kBadInput,
                    "sparse_attention.rule is drop with run.device = {}: dropped rows are left out "
                    "on CPUs only; wanted sparse_attention.rule = hash or run.device = cpu",
                    setting.device);
}

}  // namespace dynmo::dynamism
