// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keeps a run's series as they were at the checkpoints and snapshots that the run may go back to.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

#include "dynmo/train/setup/run_series.h"

namespace dynmo::train {

class KeptSeries {
 public:
  static constexpr std::int64_t kMost = 8;  // checkpoints; the series of one take up to a MiB

  // `checkpoints`: that stay on the disk. A run that has to go further back than to the newest
  // kMost goes on, and does not know all that was before.
  explicit KeptSeries(std::int64_t checkpoints)
      // The oldest is where the run began. One may be under way.
      : most_(static_cast<std::size_t>(std::min(checkpoints, kMost)) + 2) {}

  // Before step `step`.
  void add_checkpoint(std::int64_t step, const RunSeries& series) {
    checkpoints_.insert_or_assign(step, series);
    if (checkpoints_.size() > most_ + 1) checkpoints_.erase(std::next(checkpoints_.begin()));
  }
  void add_snapshot(std::int64_t step, const RunSeries& series) {
    snapshots_.insert_or_assign(step, series);
    if (snapshots_.size() > 2) snapshots_.erase(snapshots_.begin());
  }
  // Returns what was before step `step`; null where that is not known: a rank that came later does
  // not know all that was before. Snapshots of later steps are forgotten; a checkpoint may still
  // come on the disk, and the next loss go on from it.
  [[nodiscard]] const RunSeries* roll_back(std::int64_t step) {
    snapshots_.erase(snapshots_.upper_bound(step), snapshots_.end());
    if (const auto at = snapshots_.find(step); at != snapshots_.end()) return &at->second;
    const auto at = checkpoints_.find(step);
    return at != checkpoints_.end() ? &at->second : nullptr;
  }

  bool knows_all = true;  // RunLog::knows_all

 private:
  std::size_t most_;
  std::map<std::int64_t, RunSeries> checkpoints_;  // by step
  std::map<std::int64_t, RunSeries> snapshots_;
};

}  // namespace dynmo::train
