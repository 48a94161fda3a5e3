// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/earlier_run.h"

#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/observe/run_folder.h"

namespace dynmo::train {
namespace {

namespace fs = std::filesystem;

// The run's own folder, then those of the runs that are compared.
std::vector<observe::RunFolder> folders_of(const TrainOptions& options) {
  const observe::RunFolder root(options.config.run.directory);
  std::vector<observe::RunFolder> folders = {root};
  for (const std::string& name : options.compare) folders.push_back(root.of(name));
  return folders;
}

// Files that every run has written before its first step.
std::vector<fs::path> marks_of(const observe::RunFolder& folder) {
  return {folder.config(), folder.events(), folder.summary()};
}

std::vector<fs::path> files_of(const observe::RunFolder& folder) {
  std::vector<fs::path> files = {folder.config(),  folder.events(), folder.summary(),
                                 folder.profile(), folder.trace(),  folder.checkpoints(),
                                 folder.records()};
  std::error_code fault;
  for (fs::directory_iterator next(folder.root(), fault);
       !fault && next != fs::directory_iterator(); next.increment(fault)) {
    const std::string name = next->path().filename().string();
    if (name.starts_with("load-trace") && name.ends_with(".jsonl")) files.push_back(next->path());
  }
  return files;
}

}  // namespace

Expected<void> check_folder_is_free(const TrainOptions& options) {
  if (options.resume || options.overwrite) return {};
  for (const observe::RunFolder& folder : folders_of(options)) {
    DYNMO_ASSIGN(const auto checkpoints, checkpoint::list_checkpoints(folder.checkpoints()));
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
    for (const fs::path& file : files_of(folder)) {
      std::error_code fault;
      found = fs::remove_all(file, fault) > 0 || found;
      if (!fault) continue;
      return make_error(ErrorCode::kBadInput, "cannot remove '{}' of the earlier run: {}",
                        file.string(), fault.message());
    }
  }
  return found;
}

}  // namespace dynmo::train
