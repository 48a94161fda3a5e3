// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/interruption.h"

#include <algorithm>
#include <system_error>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/observe/step_record.h"

namespace dynmo::train {
namespace {

namespace fs = std::filesystem;

// When it was written, if that was after `begin`.
std::optional<fs::file_time_type> written_since(const fs::path& path, fs::file_time_type begin) {
  std::error_code fault;
  const auto written = fs::last_write_time(path, fault);
  return !fault && written >= begin ? std::optional(written) : std::nullopt;
}

// A rank that has left the run writes no more: of all ranks' records those that were written last.
std::optional<fs::path> newest_records(const fs::path& folder, fs::file_time_type begin) {
  std::error_code fault;
  std::optional<fs::path> newest;
  for (const auto& entry : fs::directory_iterator(folder, fault)) {
    const auto written = written_since(entry.path(), begin);
    if (!written || entry.path().extension() != ".jsonl") continue;
    begin = *written;
    newest = entry.path();
  }
  return newest;
}

}  // namespace

Interruption find_interruption(const TrainOptions& options, std::filesystem::file_time_type begin) {
  const observe::RunFolder folder(options.config.run.directory);
  // Of several runs that advance in turn the last is the one that has done the fewest steps.
  const observe::RunFolder last = folder.of(options.compare.empty() ? "" : options.compare.back());
  Interruption found{.config = folder.config()};
  if (const auto records = newest_records(last.records(), begin)) {
    const auto steps = observe::read_records(*records);
    if (steps && !steps->empty()) found.steps_done = steps->back().step + 1;
  }
  const auto checkpoints = checkpoint::list_checkpoints(folder.checkpoints());
  if (!checkpoints || checkpoints->empty()) return found;
  const checkpoint::CheckpointFolder& newest = checkpoints->front();
  found.checkpoint_step = newest.step;
  // The last lines of the records may not have been written, what the checkpoint has was done.
  const auto written = written_since(newest.path, begin);
  if (written) found.steps_done = std::max(found.steps_done.value_or(0), newest.step);
  return found;
}

}  // namespace dynmo::train
