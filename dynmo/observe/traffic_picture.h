// SPDX-License-Identifier: Apache-2.0
#pragma once

// The messages of a run as a picture: ranks x ranks, senders as rows, measured beside predicted.
// The ranks of a node stand together in a frame; shades are logarithmic in the bytes. Control is
// left out of pictures, as nothing predicts it.

#include <span>
#include <string>

#include "dynmo/observe/traffic_log.h"

namespace dynmo::observe {

inline constexpr std::size_t kMaxDrawnRanks = 32;  // as text

struct TrafficTextOptions {
  bool ascii = false;  // plain ASCII instead of UTF-8
};

// Lines of text, each ending with a newline, with a line of what was measured and predicted by
// purpose; of more than kMaxDrawnRanks ranks this line only. "" where nothing was sent.
[[nodiscard]] std::string traffic_text(const TrafficInterval& traffic,
                                       const TrafficTextOptions& options = {});

// A drawing of its own, that a browser shows; pointing at a cell tells its bytes.
[[nodiscard]] std::string traffic_svg(const TrafficInterval& traffic);

// A line for each pair of ranks, purpose and interval, below a line of titles.
[[nodiscard]] std::string traffic_csv(std::span<const TrafficInterval> intervals);

}  // namespace dynmo::observe
