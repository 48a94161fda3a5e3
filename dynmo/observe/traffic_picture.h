// SPDX-License-Identifier: Apache-2.0
#pragma once

// The messages of a run as a picture: ranks x ranks, senders as rows, measured beside predicted.
// The ranks of a node are together in a frame. Shades are logarithmic in the bytes. Pictures omit
// control, because it is not predicted.

#include <span>
#include <string>
#include <vector>

#include "dynmo/observe/traffic_log.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::observe {

inline constexpr std::size_t kMaxDrawnRanks = 32;  // as text

struct TrafficTextOptions {
  bool ascii = false;  // plain ASCII instead of UTF-8
};

// Returns a picture, and a line of measured and predicted bytes by purpose. Each line ends with a
// newline. For more than kMaxDrawnRanks ranks it returns that line only. Returns "" if nothing was
// sent.
[[nodiscard]] std::string traffic_text(const TrafficInterval& traffic,
                                       const TrafficTextOptions& options = {});

// Returns a drawing for a browser. Pointing at a cell shows its bytes.
[[nodiscard]] std::string traffic_svg(const TrafficInterval& traffic);

// Returns a line of titles, and a line for each pair of ranks, purpose and interval.
[[nodiscard]] std::string traffic_csv(std::span<const TrafficInterval> intervals);

// Returns measured bytes by [interval, from, to] without control. Requires an interval.
[[nodiscard]] tensor::SparseTensor tensor_of(const std::vector<TrafficInterval>& intervals);

}  // namespace dynmo::observe
