// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/file_system.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <mutex>
#include <set>
#include <string>
#include <system_error>

namespace dynmo {
namespace {

std::atomic<ShowNote> show_note = nullptr;

// Returns whether `what` is asked for the first time.
bool is_first(std::string_view what) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> told;
  const std::scoped_lock lock(mutex);
  return told.emplace(what).second;
}

bool is_folder(int descriptor) {
  struct stat status {};
  return ::fstat(descriptor, &status) == 0 && S_ISDIR(status.st_mode);
}

}  // namespace

bool is_not_offered(int error) {
  // EIO, ENOSPC, EDQUOT, EROFS, ESTALE, ENOENT and EMFILE have other causes.
  constexpr std::array kErrors = {EINVAL, ENOTSUP, EOPNOTSUPP, ENOSYS, ENODEV, ENOTTY, EACCES,
                                  EPERM,  EISDIR,  EXDEV,      ENOLCK, EBUSY,  EEXIST};
  return std::ranges::find(kErrors, error) != kErrors.end();
}

void show_notes_by(ShowNote show) { show_note = show; }

void note_not_offered(std::string_view what, int error, std::string_view then,
                      const std::filesystem::path& path) {
  const ShowNote show = show_note;
  if (show == nullptr || !is_first(what)) return;
  show(fmt::format("{} ({}): {} ('{}')", what, std::system_category().message(error), then,
                   path.string()));
}

bool sync_open(int descriptor, const std::filesystem::path& path) {
  if (::fsync(descriptor) == 0) return true;
  const int error = errno;
  if (!is_not_offered(error)) return false;
  const bool folder = is_folder(descriptor);
  note_not_offered(
      folder ? "this file system cannot sync a folder" : "this file system cannot sync a file",
      error,
      folder ? "after a power cut the newest files may be missing"
             : "after a power cut the newest files may be damaged",
      path);
  return true;
}

bool rename_over(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) return true;
  const int error = errno;
  const std::filesystem::path older = from.string() + ".old";
  std::error_code unread;
  const bool aside =
      is_not_offered(error) &&
      std::filesystem::is_regular_file(std::filesystem::symlink_status(to, unread)) &&
      ::rename(to.c_str(), older.c_str()) == 0;
  if (!aside || ::rename(from.c_str(), to.c_str()) != 0) {
    if (aside) (void)::rename(older.c_str(), to.c_str());
    errno = error;
    return false;
  }
  (void)::unlink(older.c_str());
  note_not_offered("this file system cannot replace a file", error,
                   "a crash while one is written leaves the older one as .old", to);
  return true;
}

}  // namespace dynmo
