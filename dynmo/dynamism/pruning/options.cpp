// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/pruning/options.h"

#include <fmt/format.h>

#include <array>
#include <string_view>

#include "dynmo/core/effects.h"

namespace dynmo::dynamism {
namespace {

constexpr std::array<std::string_view, 2> kFormNames = {"weights", "units"};
constexpr std::array<std::string_view, 2> kMagnitudeNames = {"scaled", "raw"};

}  // namespace

std::vector<SourceKey> keys_of(PruningOptions& o) {
  const ActsIf more_than_once =
      when_so(o.start < o.end, "pruning.start = pruning.end", "a later pruning.end");
  const ActsIf weights = when("form", Names{"weights"});
  const ActsIf units = when("form", Names{"units"});
  return {
      {.name = "start",
       .field = &o.start,
       .allowed = between(0, 1e12),
       .help = "first step that prunes"},
      {.name = "end",
       .field = &o.end,
       .allowed = between(0, 1e12),
       .help = "last one, a whole number of `every` behind start"},
      {.name = "every",
       .field = &o.every,
       .allowed = between(1, 1e12),
       .help = "steps between",
       .acts_if = {more_than_once}},
      {.name = "initial_sparsity",
       .field = &o.initial_sparsity,
       .allowed = between(0, 1),
       .help = "share of the weights gone at start",
       .acts_if = {more_than_once}},
      {.name = "final_sparsity",
       .field = &o.final_sparsity,
       .allowed = between(0, 1),
       .help = "... and at end"},
      {.name = "form",
       .field = toml_choice(&o.form, kFormNames),
       .allowed = {},
       .help = "what is removed: single weights, or hidden units and heads"},
      {.name = "unit_multiple",
       .field = &o.unit_multiple,
       .allowed = between(1, 1024),
       .help = "an MLP keeps a multiple of it",
       .acts_if = {units}},
      {.name = "unit_spread",
       .field = &o.unit_spread,
       .allowed = between(1e-6, 10),
       .help = "std of sizes of units / mean",
       .used_by = UsedBy::kLoad,
       .acts_if = {units}},
      {.name = "product_fixed",
       .field = &o.product_fit.fixed,
       .allowed = between(0, 1e6),
       .help = "time of sparse products / of dense ones: a part",
       .used_by = UsedBy::kLoad,
       .acts_if = {weights}},
      {.name = "product_weights",
       .field = &o.product_fit.weights,
       .allowed = between(1e-6, 1e6),
       .help = "... a part for the weights left",
       .used_by = UsedBy::kLoad,
       .acts_if = {weights}},
      {.name = "product_segments",
       .field = &o.product_fit.segments,
       .allowed = between(0, 1e6),
       .help = "... and for the segments left",
       .used_by = UsedBy::kLoad,
       .acts_if = {weights}},
      {.name = "depth_ratio",
       .field = &o.depth_ratio,
       .allowed = between(1e-3, 1e3),
       .help = "std of the last block's weights / of the first's",
       .used_by = UsedBy::kLoad},
      {.name = "matrix_spread",
       .field = &o.matrix_spread,
       .allowed = between(0, 10),
       .help = "std of a matrix's log std",
       .used_by = UsedBy::kLoad},
      {.name = "output_scale",
       .field = &o.output_scale,
       .allowed = between(1e-6, 1e6),
       .help = "factor on the std of output matrices",
       .used_by = UsedBy::kLoad,
       .acts_if = {weights}},
      {.name = "max_sparsity",
       .field = &o.max_sparsity,
       .allowed = between(0, 1),
       .help = "of one matrix, or a layer's units"},
      {.name = "magnitude",
       .field = toml_choice(&o.magnitude, kMagnitudeNames),
       .allowed = {},
       .help = "what weights are compared by: |w| / the matrix's initial std, or |w|",
       .used_by = UsedBy::kTraining},
      {.name = "sparse_above",
       .field = TomlAuto{&o.sparse_above},
       .allowed = between(0, 1, "or auto"),
       .help = "sparsity of a matrix from which on it is compressed; auto: measured once",
       .used_by = UsedBy::kTraining,
       .acts_if = {weights}},
      {.name = "index_bytes",
       .field = &o.index_bytes,
       .allowed = between(0, 64),
       .help = "of each weight of a sparse matrix",
       .used_by = UsedBy::kLoad,
       .acts_if = {weights}},
  };
}

Expected<void> check(const PruningOptions& o) {
  DYNMO_TRY(check_key_values("pruning", o));
  if (o.end < o.start || (o.end - o.start) % o.every != 0) {
    return make_error(ErrorCode::kBadInput,
                      "pruning.end is {}, wanted a whole number of pruning.every ({}) behind "
                      "pruning.start, {}",
                      o.end, o.every, o.start);
  }
  if (o.final_sparsity < o.initial_sparsity || o.final_sparsity > o.max_sparsity) {
    return make_error(ErrorCode::kBadInput,
                      "pruning.final_sparsity is {}, wanted pruning.initial_sparsity, {}, to "
                      "pruning.max_sparsity, {}",
                      o.final_sparsity, o.initial_sparsity, o.max_sparsity);
  }
  if (o.form == PruningForm::kUnits && o.max_sparsity >= 1) {
    return make_error(ErrorCode::kBadInput,
                      "pruning.max_sparsity is 1 with pruning.form = units, which would leave a "
                      "layer without units: wanted a number below 1, such as 0.98");
  }
  return {};
}

Expected<void> check_training(const PruningOptions& o, const TrainingSetting& setting) {
  if (setting.steps > 0 && o.end >= setting.steps) {
    return make_error(ErrorCode::kBadInput,
                      "pruning.end is {} in a run of {} steps, wanted a step of it: lower "
                      "pruning.end or raise train.steps",
                      o.end, setting.steps);
  }
  return {};
}

std::optional<Idle> idle_in(const PruningOptions& o, const TrainingSetting& setting) {
  if (o.final_sparsity == 0) {
    return Idle{.given = "pruning.final_sparsity is 0",
                .nothing = "no weight would be pruned",
                .why = "all are to stay",
                .wanted = "a larger share"};
  }
  if (o.start < setting.steps) return {};
  return Idle{.given = fmt::format("pruning.start is {}", o.start),
              .nothing = "no weight would be pruned",
              .why = "the run ends before",
              .wanted = "an earlier start or more steps"};
}

}  // namespace dynmo::dynamism
