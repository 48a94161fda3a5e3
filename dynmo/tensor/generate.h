// SPDX-License-Identifier: Apache-2.0
#pragma once

// Makes sparse tensors of given features, to plan with and to publish in place of private ones.
// Numbers of entries, of nonempty fibers and slices, and the largest of each are exactly as asked;
// coefficients of variation nearly. The same request gives the same bytes everywhere.

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/tensor/features.h"

namespace dynmo::tensor {

// Slices vary in the last two modes, fibers in the last one.
struct Request {
  std::vector<std::uint64_t> sizes;  // of at least two modes
  std::uint64_t slices = 1;          // nonempty ones
  std::uint64_t fibers = 1;          // nonempty ones
  std::uint64_t entries = 1;
  std::uint64_t fibers_max = 1;   // of a slice
  double fibers_cv = 0;           // over nonempty slices
  std::uint64_t entries_max = 1;  // of a fiber
  double entries_cv = 0;          // over nonempty fibers
  std::uint64_t seed = 1;
};

// Called with pieces of text, each of whole lines.
using Writer = std::function<Expected<void>(std::string_view)>;

// Writes the tensor as coordinates with a header, in ascending order, values between 0.1 and 0.9.
// Memory holds one slice and a number a nonempty slice. kBadInput names two requests that
// contradict each other; kBadInput: sizes or counts out of range; else what `write` answers.
[[nodiscard]] Expected<void> generate(const Request& request, const Writer& write);

// The request for a tensor with features like these; kBadInput: fewer than two modes.
[[nodiscard]] Expected<Request> request_like(const Features& features);

// Counts of tokens by [step, block, expert], with values that change slowly.
struct CountsRequest {
  std::int64_t steps = 1;
  std::int64_t blocks = 1;
  std::int64_t experts = 2;
  std::uint64_t tokens = 1;  // of each block in a step, over its experts
  double cv = 0;             // over all counts
  // Over the sums of each expert over all steps: above what drift leaves, experts are unlike for
  // good. None: as drift leaves it.
  std::optional<double> lasting_cv = {};
  bool drift_may_leave_more = false;  // ... than lasting_cv, which is an error otherwise
  double autocorrelation = 0;  // of an expert's counts in two adjacent steps, above -1, below 1
  // The share of a block's tokens that one expert has at most: a half where each goes to two
  // experts.
  double max_share = 1;
  // Where and when counts are more uneven than elsewhere, and less: parts of the steps and of the
  // blocks, any number, linear between their middles. Followed as nearly as cv allows. Empty: the
  // same everywhere.
  Unevenness uneven = {};
  std::uint64_t seed = 1;
};

// Writes lines that moe.counts reads. Errors as generate.
[[nodiscard]] Expected<void> generate_counts(const CountsRequest& request, const Writer& write);

// Seconds of layers by step, with values that change slowly.
struct CostsRequest {
  std::int64_t steps = 1;
  std::int64_t layers = 2;
  double step_s = 1;  // of F, I and W of a micro-batch, over all layers
  double cv = 0;      // over all values; the next two as of counts
  std::optional<double> lasting_cv = {};
  double autocorrelation = 0;
  std::uint64_t seed = 1;
};

// Writes a load trace ("dynmo-load-trace-1"); F, I and W of a layer take a third each. Errors as
// generate.
[[nodiscard]] Expected<void> generate_costs(const CostsRequest& request, const Writer& write);

// kBadInput: features of something else than seconds by step and layer.
[[nodiscard]] Expected<CostsRequest> costs_request_like(const Features& features);

// kBadInput: features of something else than counts by step, block and expert.
[[nodiscard]] Expected<CountsRequest> counts_request_like(const Features& features);

}  // namespace dynmo::tensor
