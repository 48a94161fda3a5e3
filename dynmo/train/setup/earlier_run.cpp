// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/earlier_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <ranges>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/files.h"
#include "dynmo/data/dataset.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/observe/step_record.h"

namespace dynmo::train {
namespace {

namespace fs = std::filesystem;

// Returns the run's own folder, then those of the runs that it compares.
std::vector<observe::RunFolder> folders_of(const TrainOptions& options) {
  const observe::RunFolder root(options.config.run.directory);
  std::vector<observe::RunFolder> folders = {root};
  for (const std::string& name : options.compare) folders.push_back(root.of(name));
  return folders;
}

// Returns the files that every run writes before its first step.
std::vector<fs::path> marks_of(const observe::RunFolder& folder) {
  return {folder.config(), folder.events(), folder.summary()};
}

std::vector<fs::path> files_of(const observe::RunFolder& folder) {
  std::vector<fs::path> files = {folder.config(),  folder.events(),  folder.summary(),
                                 folder.profile(), folder.trace(),   folder.checkpoints(),
                                 folder.records(), folder.cluster(), folder.traffic()};
  std::error_code fault;
  for (fs::directory_iterator next(folder.root(), fault);
       !fault && next != fs::directory_iterator(); next.increment(fault)) {
    const std::string name = next->path().filename().string();
    if (name.starts_with("load-trace") && name.ends_with(".jsonl")) files.push_back(next->path());
  }
  return files;
}

// Returns a file that belongs to the user instead of a run. A run would write it only after the
// files of marks_of(), of which there is none, or it is a data set.
std::optional<fs::path> file_of_no_run(const observe::RunFolder& folder) {
  std::error_code fault;
  for (const fs::path& mark : marks_of(folder)) {
    if (fs::exists(mark, fault)) return std::nullopt;
  }
  for (const fs::path& file : {folder.cluster(), folder.profile(), folder.trace(), folder.traffic(),
                               folder.root() / data::kDescriptionFile}) {
    if (fs::exists(file, fault)) return file;
  }
  return std::nullopt;
}

// Returns the time at which a file was written, if that was after `begin`.
std::optional<fs::file_time_type> written_since(const fs::path& path, fs::file_time_type begin) {
  std::error_code fault;
  const auto written = fs::last_write_time(path, fault);
  return !fault && written >= begin ? std::optional(written) : std::nullopt;
}

// Returns the records that were written last, because a rank that has left the run writes no more.
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

Expected<void> check_folder_is_free(const TrainOptions& options) {
  if (options.resume) return {};
  for (const observe::RunFolder& folder : folders_of(options)) {
    DYNMO_ASSIGN(const auto checkpoints, checkpoint::list_checkpoints(folder.checkpoints()));
    const auto other = checkpoints.empty() ? file_of_no_run(folder) : std::nullopt;
    if (other) {
      return make_error(ErrorCode::kBadInput,
                        "'{}' holds '{}', which is of no run: wanted another {}",
                        folder.root().string(), other->string(), options.names.directory);
    }
    if (options.overwrite) continue;
    std::string found;
    if (!checkpoints.empty()) {
      found =
          fmt::format("{} checkpoints in '{}'", checkpoints.size(), folder.checkpoints().string());
    }
    std::error_code fault;
    for (const fs::path& file : marks_of(folder)) {
      if (found.empty() && fs::exists(file, fault)) found = fmt::format("'{}'", file.string());
    }
    if (found.empty()) continue;
    return make_error(ErrorCode::kBadInput,
                      "'{}' holds an earlier run ({}): wanted {} to continue it, another {}, or {} "
                      "to remove it",
                      folder.root().string(), found, options.names.resume, options.names.directory,
                      options.names.overwrite);
  }
  return {};
}

Expected<bool> remove_earlier_run(const TrainOptions& options) {
  if (options.resume || !options.overwrite) return false;
  bool found = false;
  for (const observe::RunFolder& folder : folders_of(options)) {
    // Marks are removed last: without them the other files belong to no run.
    for (const fs::path& file : files_of(folder) | std::views::reverse) {
      std::error_code fault;
      found = fs::remove_all(file, fault) > 0 || found;
      if (!fault) continue;
      return make_error(ErrorCode::kBadInput, "cannot remove '{}' of the earlier run: {}",
                        file.string(), fault.message());
    }
  }
  return found;
}

Expected<RunLocks> lock_run(const TrainOptions& options) {
  const observe::RunFolder folder(options.config.run.directory);
  std::vector<std::string> names = {""};
  names.insert(names.end(), options.compare.begin(), options.compare.end());
  RunLocks locks;
  const std::set<std::string> folders(names.begin(), names.end());  // a name twice is told later
  for (const std::string& name : folders) {
    const observe::RunFolder own = folder.of(name);
    DYNMO_TRY(make_directories(own.root()));
    auto lock = process::FileLock::take(own.lock());
    if (!lock) {
      return make_error(lock.error().code,
                        "'{}' cannot be the folder of this run: {}; wanted another run.directory",
                        own.root().string(), lock.error().message);
    }
    locks.push_back(std::move(*lock));
  }
  return locks;
}

Interruption find_interruption(const TrainOptions& options, std::filesystem::file_time_type begin) {
  const observe::RunFolder folder(options.config.run.directory);
  // The last one of several runs that advance in turn has done the fewest steps.
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
  // The last records may not have been written, but the steps of a checkpoint were done.
  const auto written = written_since(newest.path, begin);
  if (written) found.steps_done = std::max(found.steps_done.value_or(0), newest.step);
  return found;
}

}  // namespace dynmo::train
