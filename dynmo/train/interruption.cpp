// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/interruption.h"

#include <system_error>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/observe/step_record.h"

namespace dynmo::train {

Interruption find_interruption(const TrainOptions& options, std::filesystem::file_time_type begin) {
  const observe::RunFolder folder(options.config.run.directory);
  // Of several runs that advance in turn the last is the one that has done the fewest steps.
  const observe::RunFolder last = folder.of(options.compare.empty() ? "" : options.compare.back());
  Interruption found{.config = folder.config()};
  std::error_code fault;
  const std::filesystem::path records = last.records_of(WorldRank(0));
  const auto written = std::filesystem::last_write_time(records, fault);
  if (!fault && written >= begin) {
    const auto steps = observe::read_records(records);
    if (steps && !steps->empty()) found.steps_done = steps->back().step + 1;
  }
  const auto checkpoints = checkpoint::list_checkpoints(folder.checkpoints());
  if (checkpoints && !checkpoints->empty()) found.checkpoint_step = checkpoints->front().step;
  return found;
}

}  // namespace dynmo::train
