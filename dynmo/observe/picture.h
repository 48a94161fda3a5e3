// SPDX-License-Identifier: Apache-2.0
#pragma once

// The pipeline of one step as text: a row a rank, time from left to right, idle time as dots.
// Readable without colour.

#include <string>

#include "dynmo/schedule/timeline.h"

namespace dynmo::observe {

struct PictureOptions {
  int width = 100;     // columns of a line at most, the ranks' names included
  int rows = 32;       // ranks shown at most: the first and the last ones, "..." between
  bool ascii = false;  // plain ASCII instead of UTF-8
};

// Compute actions (F, I, W, B) from 0 to the end of the last one; communication is passed over. The
// first stage of a rank is in upper case, its others in lower case. Where a row has four columns an
// action, each cell names its micro-batch, such as `F0--`; else a column shows what fills most of
// it. Below the rows are the time axis and a legend. Every line ends with a newline; "" where
// nothing ran. Requires width >= 40, rows >= 2.
[[nodiscard]] std::string picture(const schedule::Timeline& timeline,
                                  const PictureOptions& options = {});

}  // namespace dynmo::observe
