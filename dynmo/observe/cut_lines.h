// SPDX-License-Identifier: Apache-2.0
#pragma once

// Cuts a file of JSON lines back to a step, for a run that goes back to it.

#include <cstdint>
#include <filesystem>

#include "dynmo/core/expected.h"

namespace dynmo::observe {

struct CutLines {
  bool has_header = false;   // a line is left
  std::int64_t newest = -1;  // the last step that is left
};

// Removes the lines from step `step` on, and a half-written line at the end. Reads the removed
// lines and the last one that is left. Requires steps that do not decrease. Does nothing if there
// is no file. Returns kBadInput with the path.
[[nodiscard]] Expected<CutLines> cut_lines(const std::filesystem::path& path, std::int64_t step);

}  // namespace dynmo::observe
