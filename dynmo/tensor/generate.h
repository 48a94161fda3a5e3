// SPDX-License-Identifier: Apache-2.0
#pragma once

// Makes sparse tensors of given features, to plan with and to publish in place of private ones. The
// numbers of entries, nonempty fibers and nonempty slices are exact. So are the maxima of each.
// Coefficients of variation are met approximately. The same request gives the same bytes with the
// same math library on processors of one kind. Elsewhere log() or exp() may round otherwise, which
// changes single numbers.

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/tensor/features.h"

namespace dynmo::tensor {

// A request for a tensor. Slices vary in the last two modes, fibers in the last one.
struct Request {
  std::vector<std::uint64_t> sizes;  // two modes or more
  std::uint64_t slices = 1;          // nonempty
  std::uint64_t fibers = 1;          // nonempty
  std::uint64_t entries = 1;
  std::uint64_t fibers_max = 1;   // largest number in a slice
  double fibers_cv = 0;           // over nonempty slices
  std::uint64_t entries_max = 1;  // largest number in a fiber
  double entries_cv = 0;          // over nonempty fibers
  std::uint64_t seed = 1;
};

// Takes pieces of text, each of whole lines.
using Writer = std::function<Expected<void>(std::string_view)>;

// Writes the tensor as coordinates with a header, in ascending order, with values between 0.1 and
// 0.9. Memory holds one slice and a number for each nonempty slice.
//
// Fails with kBadInput if sizes or counts are out of range. Also fails if two requests contradict
// each other, and names them. Also returns every error of `write`.
[[nodiscard]] Expected<void> generate(const Request& request, const Writer& write);

// Returns the request for a tensor with these features, or kBadInput if there are fewer than two
// modes.
[[nodiscard]] Expected<Request> request_like(const Features& features);

// A request for counts of tokens by [step, block, expert], whose values change slowly.
struct CountsRequest {
  std::int64_t steps = 1;
  std::int64_t blocks = 1;
  std::int64_t experts = 2;
  // Sum over the experts of each block in a step.
  std::uint64_t tokens = 1;
  double cv = 0;  // over all counts
  // Coefficient of variation of the experts' sums over all steps. Drift alone leaves some. A larger
  // value makes some experts permanently more popular. Unset: what drift leaves.
  std::optional<double> lasting_cv = {};
  // Accepts that drift leaves more than lasting_cv. Otherwise that is an error.
  bool drift_may_leave_more = false;
  // Correlation of an expert's counts in two adjacent steps, above -1 and below 1. Counts that
  // never change (cv is 0 or lasting_cv) have none.
  double autocorrelation = 0;
  // The largest share of a block's tokens that one expert has. It is a half if each token goes to
  // two experts.
  double max_share = 1;
  // Relative unevenness of the counts in equal parts of the steps and of the blocks. There may be
  // any number of parts. Values are interpolated linearly between the middles of parts. The result
  // follows them as closely as `cv` permits. If empty, all parts are alike.
  Unevenness uneven = {};
  std::uint64_t seed = 1;
};

// Writes lines that moe.counts reads. Returns errors like generate().
[[nodiscard]] Expected<void> generate_counts(const CountsRequest& request, const Writer& write);

// A request for seconds of layers by step, whose values change slowly.
struct CostsRequest {
  std::int64_t steps = 1;
  std::int64_t layers = 2;
  // Sum of F, I and W of a micro-batch over all layers.
  double step_s = 1;
  double cv = 0;  // over all values; the next three as in CountsRequest
  std::optional<double> lasting_cv = {};
  bool drift_may_leave_more = false;
  double autocorrelation = 0;
  std::uint64_t seed = 1;
};

// Writes a load trace ("dynmo-load-trace-1"). F, I and W of a layer take a third each. Returns
// errors like generate().
[[nodiscard]] Expected<void> generate_costs(const CostsRequest& request, const Writer& write);

// Returns the request for costs with these features. Returns kBadInput if they are not the features
// of seconds by step and layer.
[[nodiscard]] Expected<CostsRequest> costs_request_like(const Features& features);

// Returns the request for counts with these features. Returns kBadInput if they are not the
// features of counts by step, block and expert.
[[nodiscard]] Expected<CountsRequest> counts_request_like(const Features& features);

// Returns the request for a similar load of other sizes. Over other numbers of steps, drift leaves
// another part of itself in the sums, and lasting_cv follows. The largest share keeps its ratio to
// the mean, but is at most 1.
[[nodiscard]] CountsRequest resized(CountsRequest request, std::int64_t steps, std::int64_t blocks,
                                    std::int64_t experts);
[[nodiscard]] CostsRequest resized(CostsRequest request, std::int64_t steps, std::int64_t layers);

}  // namespace dynmo::tensor
