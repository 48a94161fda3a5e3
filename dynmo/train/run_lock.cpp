// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/run_lock.h"

#include <fmt/format.h>

#include <set>
#include <string>

#include "dynmo/core/files.h"
#include "dynmo/observe/run_folder.h"

namespace dynmo::train {

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

}  // namespace dynmo::train
