// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <ctime>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "dynmo/core/file_system.h"
#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/process/kernel_ids.h"

namespace dynmo::process {
namespace {

constexpr std::string_view kFormat = "dynmo-lock-1";

// Returns the clock ticks from the boot to the start of a process, or nullopt if there is none.
std::optional<std::int64_t> start_of(std::int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  std::getline(file, text);
  // "4321 (name) S ...": a name may hold anything; the start is the 22nd word, the 20th behind it.
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream words(text.substr(name_end + 1));
  std::string word;
  for (int i = 0; i < 19; ++i) words >> word;
  std::int64_t ticks = 0;
  if (!(words >> ticks)) return std::nullopt;
  return ticks;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  std::array<char, 32> text{};
  ::gmtime_r(&now, &parts);
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text.data();
}

std::optional<LockHolder> read_holder(const std::filesystem::path& path) {
  const auto json = read_json(path);
  if (!json) return std::nullopt;
  JsonObject object(*json, path.string());
  object.expect_format(kFormat);
  LockHolder holder{.host = object.string("host"),
                    .boot_id = object.string("boot_id"),
                    .pid = object.integer("pid"),
                    .start_ticks = object.integer("start_ticks"),
                    .since = object.string("since")};
  if (!object.finish()) return std::nullopt;
  return holder;
}

// Writes the holder into the file. A failure (a full disk) does not matter: the lock is held.
void write_holder(const UniqueFd& file, const LockHolder& holder) {
  const Json json = {{"format", kFormat},
                     {"host", holder.host},
                     {"boot_id", holder.boot_id},
                     {"pid", holder.pid},
                     {"start_ticks", holder.start_ticks},
                     {"since", holder.since}};
  const std::string text = json.dump() + "\n";
  if (::ftruncate(file.get(), 0) == 0) (void)!::pwrite(file.get(), text.data(), text.size(), 0);
}

Error held_error(const std::optional<LockHolder>& holder) {
  if (!holder) return make_error(ErrorCode::kBadInput, "in use by another run");
  return make_error(ErrorCode::kBadInput, "in use by another run: process {} on {}, since {}",
                    holder->pid, holder->host, holder->since);
}

// Returns whether the path still names the open file. Its last holder may have removed it
// meanwhile.
bool is_at(const UniqueFd& file, const std::filesystem::path& path) {
  struct stat open {};
  struct stat named {};
  return ::fstat(file.get(), &open) == 0 && ::stat(path.c_str(), &named) == 0 &&
         open.st_dev == named.st_dev && open.st_ino == named.st_ino;
}

// Like is_at(), by the file's content, for file systems whose inode numbers change (CIFS, FUSE).
bool is_at_by_content(const UniqueFd& file, const std::filesystem::path& path) {
  const LockHolder self = this_process();
  write_holder(file, self);
  const auto there = read_holder(path);
  return there && there->host == self.host && there->boot_id == self.boot_id &&
         there->pid == self.pid && there->start_ticks == self.start_ticks;
}

}  // namespace

LockHolder this_process() {
  const std::int64_t pid = ::getpid();
  return {.host = host_name(),
          .boot_id = boot_id(),
          .pid = pid,
          .start_ticks = start_of(pid).value_or(0),
          .since = utc_now()};
}

bool is_gone(const LockHolder& holder) {
  if (holder.boot_id != boot_id()) return holder.host == host_name();
  return start_of(holder.pid) != holder.start_ticks;
}

Expected<FileLock> FileLock::take(const std::filesystem::path& path) {
  constexpr int kRemoved = 100;  // tries, as a holder may remove the file after its opening
  for (int tries = 0;; ++tries) {
    UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
    if (!file) {
      return make_error(ErrorCode::kBadInput, "cannot create '{}': {}", path.string(),
                        system_reason(errno));
    }
    const bool locked = ::flock(file.get(), LOCK_EX | LOCK_NB) == 0;
    if (!locked && errno == EINTR) continue;
    if (!locked && errno == EWOULDBLOCK) return held_error(read_holder(path));
    if (!locked) {
      note_not_offered("this file system has no locks", errno,
                       "a second run in this folder is refused by what stands in a file", path);
      const auto holder = read_holder(path);
      if (holder && !is_gone(*holder)) return held_error(holder);
    }
    if (!is_at(file, path) && (tries < kRemoved || !is_at_by_content(file, path))) continue;
    write_holder(file, this_process());
    return FileLock(path, std::move(file));
  }
}

FileLock::~FileLock() {
  if (file_ && is_at(file_, path_)) ::unlink(path_.c_str());
}

}  // namespace dynmo::process
