// SPDX-License-Identifier: Apache-2.0
#pragma once

// The pipeline of one step as text. Each rank is a row, time runs from left to right, and idle time
// is dots. Readable without colour.

#include <string>

#include "dynmo/schedule/schedule.h"

namespace dynmo::observe {

struct PictureOptions {
  int width = 100;     // maximum columns of a line, the ranks' names included
  int rows = 32;       // maximum ranks shown: the first and the last ones, "..." between
  bool ascii = false;  // plain ASCII instead of UTF-8
};

// Draws the compute actions (F, I, W, B) from 0 to the end of the last one, without communication.
// The first stage of a rank is in upper case, its others in lower case. If a row has four columns
// for each action, each cell names its micro-batch, such as `F0--`. Else a column shows the action
// with the largest share of it.
//
// Below the rows are the time axis and a legend. Every line ends with a newline. Returns "" if
// nothing ran. Requires width >= 40, rows >= 2.
[[nodiscard]] std::string picture(const schedule::Timeline& timeline,
                                  const PictureOptions& options = {});

}  // namespace dynmo::observe
