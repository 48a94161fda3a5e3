// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/moe/options.h"

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "dynmo/core/effects.h"

namespace dynmo::dynamism {
namespace {

constexpr std::array<std::string_view, 5> kRoutingNames = {"top_k", "bias", "sinkhorn", "balanced",
                                                           "expert_choice"};
constexpr std::array<std::string_view, 2> kDroppingNames = {"position", "probability"};
constexpr double kMaxLayerExperts = 4096;  // of a layer: each is three parameters

}  // namespace

std::vector<SourceKey> keys_of(MoeOptions& o) {
  const std::string router =
      fmt::format("moe.router = {}", kRoutingNames[static_cast<std::size_t>(o.router)]);
  // The other routers have a loss of 0.
  const ActsIf balances =
      when_so(o.router == MoeRouter::kTopK || o.aux_loss == 0, router, "moe.router = top_k");
  // A balanced router never gives an expert more than the even share.
  const ActsIf bounds = when_so(o.router != MoeRouter::kBalanced || o.capacity_factor < 1, router,
                                "another moe.router or a number below 1");
  const ActsIf chooses =
      when("router", Names{"top_k", "bias", "sinkhorn", "balanced"}, "another moe.router");
  const ActsIf drops = when("capacity_factor", above(0), "a moe.capacity_factor above 0");
  const ActsIf drawn = when_empty("counts");
  const ActsIf drifts = when("drift", above(0), "a moe.drift above 0");
  const ActsIf settles = either(when("early_skew", above(0), "a moe.early_skew above 0"), drifts);
  return {
      {.name = "experts",
       .field = &o.experts,
       .allowed = between(1, kMaxLayerExperts),
       .help = "of every block, in the place of its MLP",
       .used_by = UsedBy::kTraining},
      {.name = "top_k",
       .field = &o.top_k,
       .allowed = between(1, kMaxLayerExperts),
       .help = "experts of a token",
       .used_by = UsedBy::kTraining},
      {.name = "expert_hidden",
       .field = &o.expert_hidden,
       .allowed = between(0, 1 << 20),
       .help = "intermediate width of an expert; 0: model.intermediate",
       .used_by = UsedBy::kTraining},
      {.name = "router",
       .field = toml_choice(&o.router, kRoutingNames),
       .allowed = {},
       .help = "how experts and tokens choose each other",
       .used_by = UsedBy::kTraining},
      {.name = "aux_loss",
       .field = &o.aux_loss,
       .allowed = between(0, 1e6),
       .help = "factor of the loss of uneven counts",
       .used_by = UsedBy::kTraining,
       .acts_if = {balances}},
      {.name = "z_loss",
       .field = &o.z_loss,
       .allowed = between(0, 1e6),
       .help = "factor of the loss of large scores",
       .used_by = UsedBy::kTraining},
      {.name = "bias_rate",
       .field = &o.bias_rate,
       .allowed = between(0, 1),
       .help = "what a step adds to the bias of an expert below the mean",
       .used_by = UsedBy::kTraining,
       .acts_if = {when("router", Names{"bias"})}},
      {.name = "expert_ranks",
       .field = &o.expert_ranks,
       .allowed = between(1, 1e6),
       .help = "devices that share the experts of a layer; they divide the experts",
       .used_by = UsedBy::kLoad},
      {.name = "counts",
       .field = &o.counts,
       .allowed = {},
       .help = "records of a training, RUN/records/rank-0.jsonl, whose counts are taken; '': drawn",
       .used_by = UsedBy::kLoad},
      {.name = "min_skew",
       .field = &o.min_skew,
       .allowed = between(0, 10),
       .help = "exponent of Zipf's law over the experts: smallest of a layer",
       .used_by = UsedBy::kLoad,
       .acts_if = {drawn}},
      {.name = "max_skew",
       .field = &o.max_skew,
       .allowed = between(0, 10),
       .help = "... and largest",
       .used_by = UsedBy::kLoad,
       .acts_if = {drawn}},
      {.name = "early_skew",
       .field = &o.early_skew,
       .allowed = between(0, 10),
       .help = "the exponent starts this much (relative) higher",
       .used_by = UsedBy::kLoad,
       .acts_if = {drawn}},
      {.name = "settle_steps",
       .field = &o.settle_steps,
       .allowed = between(1, 1e9),
       .help = "... and settles with this time constant",
       .used_by = UsedBy::kLoad,
       .acts_if = {drawn, settles}},
      {.name = "drift",
       .field = &o.drift,
       .allowed = between(0, 10),
       .help = "std of an expert's log popularity",
       .used_by = UsedBy::kLoad,
       .acts_if = {drawn}},
      {.name = "drift_steps",
       .field = &o.drift_steps,
       .allowed = between(1, 1e9),
       .help = "... which has changed wholly after so many steps",
       .used_by = UsedBy::kLoad,
       .acts_if = {drawn, drifts}},
      {.name = "capacity_factor",
       .field = &o.capacity_factor,
       .allowed = between(0, 1e6),
       .help = "times the even share of an expert, the rest is dropped; 0: dropless",
       .acts_if = {bounds}},
      {.name = "drop",
       .field = toml_choice(&o.drop, kDroppingNames),
       .allowed = {},
       .help = "which tokens an expert drops, the last or the least likely",
       .used_by = UsedBy::kTraining,
       .acts_if = {chooses, drops}},
      {.name = "sampled_micro_batches",
       .field = &o.sampled_micro_batches,
       .allowed = between(1, 10000),
       .help = "whose mean is the cost of a step",
       .used_by = UsedBy::kLoad,
       .acts_if = {drawn}},
  };
}

Expected<void> check(const MoeOptions& options) {
  DYNMO_TRY(check_key_values("moe", options));
  if (options.top_k > options.experts) {
    return make_error(ErrorCode::kBadInput, "moe.top_k is {}, wanted at most moe.experts, {}",
                      options.top_k, options.experts);
  }
  if (options.min_skew <= options.max_skew) return {};
  return make_error(ErrorCode::kBadInput, "moe.min_skew is {}, wanted at most moe.max_skew, {}",
                    options.min_skew, options.max_skew);
}

}  // namespace dynmo::dynamism
