// SPDX-License-Identifier: Apache-2.0
#pragma once

// The numbers of a run by step, layer and rank, as tables that charts are drawn from
// (html_page.h). They come from the files of the run's folder (run_folder.h).

#include <filesystem>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"

namespace dynmo::observe {

// Up to so many columns of steps; a longer run has the mean of neighbouring steps in one.
inline constexpr int kMaxColumns = 400;
// ... and fewer of the table of ranks where there are many, so that it has about so many rows.
inline constexpr int kMaxRankRows = 16000;

struct RunData {
  std::string name;
  // Tables by name, each a list of objects with the same keys:
  //  steps      step, to_step, loss, step_s, predicted_s, tokens_per_s, imbalance, bubble
  //  ranks      step, to_step, rank, idle (share of the step), memory_bytes
  //  cuts       step, to_step, layer: before this layer another rank's begin
  //  decisions  step, taken, cause, reason
  //  changes    step, kind, text: changes of size, losses, recoveries
  //  losses     step, ranks, text: of changes those that are losses
  //  exits      step, to_step, exit, order, share: of the tokens, that left there; the last is the
  //  head sources    step, to_step, figure, value: figures of sources that are one number traffic
  //  from, to, purpose, bytes, messages: of the whole run
  // A table that the folder has no file for is empty.
  Json tables = Json::object();
  Json head = Json::array();  // run_head.h
  std::vector<std::string> layer_names = {};
  // Seconds of a micro-batch, forward and backward: a list of all columns of `steps` for each
  // layer.
  Json layer_seconds = Json::array();
  // A step before and after the move that promised the largest gain (move_picture.h).
  Json tracks = Json::array();
};

// The run of a folder, or the runs that it compares. kBadInput: it has no records, or a file of it
// cannot be read.
[[nodiscard]] Expected<std::vector<RunData>> read_run_data(const std::filesystem::path& folder);

}  // namespace dynmo::observe
