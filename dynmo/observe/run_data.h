// SPDX-License-Identifier: Apache-2.0
#pragma once

// The numbers of a run by step, layer and rank, as tables for charts (html_page.h). They come from
// the files of the run's folder (run_folder.h).

#include <filesystem>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"

namespace dynmo::observe {

// Maximum columns of steps. In a longer run, a column is the mean of neighbouring steps.
inline constexpr int kMaxColumns = 400;
// Maximum rows of the table of ranks, approximately. With many ranks the table has fewer columns.
inline constexpr int kMaxRankRows = 16000;

struct RunData {
  std::string name;
  // Tables by name, each a list of objects with the same keys. A table is empty if the folder has
  // no file for it.
  //
  //   steps      step, to_step, loss, step_s, predicted_s, tokens_per_s, imbalance, bubble
  //   ranks      step, to_step, rank, idle (share of the step), memory_bytes
  //   cuts       step, to_step, layer: a layer whose predecessor is on another rank
  //   decisions  step, taken, cause, reason
  //   changes    step, kind, text: changes of size, losses, recoveries
  //   losses     step, ranks, text: the losses among the changes
  //   exits      step, to_step, exit, order, share: of the tokens that left there; last: the head
  //   sources    step, to_step, figure, value: figures of sources that are one number
  //   traffic    from, to, purpose, bytes, messages: of the whole run
  Json tables = Json::object();
  Json head = Json::array();  // run_head.h
  std::vector<std::string> layer_names = {};
  // For each layer, a list of the seconds of a micro-batch, forward and backward. It has an element
  // for each column of `steps`.
  Json layer_seconds = Json::array();
  // A step before and after the move with the largest predicted gain (move_picture.h).
  Json tracks = Json::array();
};

// Reads the run of a folder, or the runs that it compares. Returns kBadInput if a run has no
// records, or a file cannot be read.
[[nodiscard]] Expected<std::vector<RunData>> read_run_data(const std::filesystem::path& folder);

}  // namespace dynmo::observe
