// SPDX-License-Identifier: Apache-2.0
//
// A crash before every single operation that changes the disk. The program replaces the system's
// own write, fsync, rename and the like by ones that count, log, and die on a chosen call, and runs
// the real code in a child process; then the parent looks at what is left. They may refuse a call,
// too, as file systems do that do not offer it.

#include <fcntl.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <string_view>

#include "dynmo/checkpoint/background_writer.h"
#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/file_system.h"
#include "dynmo/core/files.h"
#include "dynmo/process/file_lock.h"
#include "tests/support/temp_folder.h"

namespace {

constexpr int kCrashed = 77;

// Watches this process; set while no other thread writes.
struct Watch {
  int crash_at = -1;  // die instead of this operation; -1: never
  std::vector<std::string>* log = nullptr;
};
Watch watch;
std::atomic<int> operations = 0;  // of any thread, so far

// A kind of call that fails, with this errno.
enum class Call {
  kNone,
  kSyncFile,
  kSyncFolder,
  kReplaceFile,
  kRenameFolder,
  kExchange,
  kLock,
  kTruncate,
};
struct Refusal {
  Call call = Call::kNone;
  int error = 0;
};
Refusal refusal;

bool refuses(Call call) {
  if (refusal.call != call) return false;
  errno = refusal.error;
  return true;
}

bool is_folder(const char* path) {
  struct stat status {};
  return ::lstat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

std::string path_of(int file) {
  std::array<char, 4096> path{};
  const auto link = "/proc/self/fd/" + std::to_string(file);
  return ::readlink(link.c_str(), path.data(), path.size() - 1) < 0 ? "?" : path.data();
}

bool is_file_or_folder(int file) {
  struct stat status {};
  return ::fstat(file, &status) == 0 && (S_ISREG(status.st_mode) || S_ISDIR(status.st_mode));
}

// `half` does part of the operation before dying, where it has parts.
template <typename Half>
void step(const std::string& what, Half half) {
  if (watch.log != nullptr) watch.log->push_back(what);
  if (operations.fetch_add(1) == watch.crash_at) {
    half();
    ::_exit(kCrashed);
  }
}
void step(const std::string& what) {
  step(what, [] {});
}

}  // namespace

extern "C" {
ssize_t write(int file, const void* bytes, size_t size) {
  if ((watch.crash_at >= 0 || watch.log != nullptr) && is_file_or_folder(file)) {
    step("write " + path_of(file), [&] { ::syscall(SYS_write, file, bytes, size / 2); });
  }
  return ::syscall(SYS_write, file, bytes, size);
}
int fsync(int file) {
  // Not for real: what a dying process wrote stays in the system, and the tests take a tenth of the
  // time. What is synced when is seen in the log.
  step("fsync " + path_of(file));
  struct stat status {};
  const bool folder = ::fstat(file, &status) == 0 && S_ISDIR(status.st_mode);
  return refuses(folder ? Call::kSyncFolder : Call::kSyncFile) ? -1 : 0;
}
int rename(const char* from, const char* to) noexcept {
  step(std::string("rename ") + from + " " + to);
  if (::access(to, F_OK) == 0 && !is_folder(to) && refuses(Call::kReplaceFile)) return -1;
  const bool finished = std::string_view(to).ends_with(".tmp");
  if (is_folder(from) && (finished || is_folder(to)) && refuses(Call::kRenameFolder)) return -1;
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to,
              unsigned int flags) noexcept {
  step(std::string(flags == RENAME_EXCHANGE ? "exchange " : "rename ") + from + " " + to);
  if (refuses(Call::kExchange) || refuses(Call::kRenameFolder)) return -1;
  return static_cast<int>(::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}
int mkdir(const char* path, mode_t mode) noexcept {
  step(std::string("mkdir ") + path);
  return static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, path, mode));
}
int flock(int file, int operation) noexcept {
  return refuses(Call::kLock) ? -1 : static_cast<int>(::syscall(SYS_flock, file, operation));
}
int truncate(const char* path, off_t size) noexcept {
  return refuses(Call::kTruncate) ? -1 : static_cast<int>(::syscall(SYS_truncate, path, size));
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  step(std::string("unlink ") + path);
  return static_cast<int>(::syscall(SYS_unlinkat, folder, path, flags));
}
}

namespace dynmo::checkpoint {
namespace {

namespace fs = std::filesystem;

// The same by a writer's thread, the commit too; all of it copied, or nothing.
Expected<void> save_behind(const fs::path& root, std::int64_t step, std::string_view weights,
                           Bytes memory) {
  DYNMO_ASSIGN(const fs::path pending, begin_checkpoint(root, step));
  BackgroundWriter writer(memory);
  const auto size = static_cast<std::int64_t>(weights.size());
  for (const int layer : {0, 1}) {
    writer.add_layer(
        pending,
        {LayerId(layer), {{"w", DType::kU8, {size}, std::as_bytes(std::span(weights))}}, {}});
    writer.wait();
  }
  DYNMO_ASSIGN(auto entries, writer.finish());
  writer.add_task([&]() -> Expected<void> {
    DYNMO_TRY(commit_checkpoint(pending, step, std::move(entries), {{"weights", weights}}));
    DYNMO_TRY(prune(root, 2));
    return {};
  });
  DYNMO_TRY(writer.finish());
  return {};
}

Expected<fs::path> save(const fs::path& root, std::int64_t step, std::string_view weights) {
  DYNMO_ASSIGN(const fs::path pending, begin_checkpoint(root, step));
  std::vector<FileEntry> entries;
  for (const int layer : {0, 1}) {
    const auto size = static_cast<std::int64_t>(weights.size());
    const auto bytes = std::as_bytes(std::span(weights));
    DYNMO_ASSIGN(FileEntry entry,
                 write_layer(pending, {LayerId(layer), {{"w", DType::kU8, {size}, bytes}}, {}}));
    entries.push_back(std::move(entry));
  }
  return commit_checkpoint(pending, step, std::move(entries), {{"weights", weights}});
}

// Runs `work` in a child that dies before operation `crash_at`; whether it died there.
bool crashes(int crash_at, const std::function<bool()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    watch = {.crash_at = crash_at};
    operations = 0;
    ::_exit(work() ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_TRUE(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kCrashed)
      << "operation " << crash_at << ", exit " << WEXITSTATUS(status);
  return WEXITSTATUS(status) == kCrashed;
}

// The newest is the older or the newer one, whole, at every crash, and never the older one again
// after the newer was seen.
using Save = std::function<bool(const fs::path& root, std::int64_t step)>;

void expect_old_or_new(
    std::int64_t new_step, const Save& save_new = [](const fs::path& root, std::int64_t step) {
      return save(root, step, "new").has_value();
    }) {
  int operations = 0;
  bool committed = false;
  for (bool crashed = true; crashed; ++operations) {
    const TempFolder folder;
    ASSERT_TRUE(save(folder.path(), 1, "old"));
    crashed = crashes(operations, [&] { return save_new(folder.path(), new_step); });
    SCOPED_TRACE(fmt::format("crash before operation {}", operations));
    const auto newest = newest_verified(folder.path(), nullptr);
    ASSERT_TRUE(newest) << newest.error().message;
    const auto weights = newest->manifest.state["weights"].get<std::string>();
    EXPECT_TRUE(weights == "old" || weights == "new");
    EXPECT_TRUE(!committed || weights == "new") << "a later crash undid the commit";
    committed = weights == "new";
    EXPECT_TRUE(crashed || committed);
    // Life goes on: the next checkpoint clears up and succeeds.
    ASSERT_TRUE(save(folder.path(), new_step + 1, "next"));
    EXPECT_EQ(newest_verified(folder.path(), nullptr)->manifest.step, new_step + 1);
    for (const auto& entry : fs::directory_iterator(folder.path())) {
      EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
    }
  }
  EXPECT_GT(operations, 15) << "the operations are not seen";
}

TEST(Crash, BeforeAnyOperationLeavesThePreviousCheckpointOrTheNewOne) { expect_old_or_new(2); }

TEST(Crash, WhileReplacingACheckpointOfTheSameStepLeavesOneOfTheTwo) { expect_old_or_new(1); }

TEST(Crash, OfAWriterBehindTrainingLeavesThePreviousCheckpointOrTheNewOne) {
  for (const std::int64_t memory : {0, 1 << 20}) {
    for (const std::int64_t step : {1, 2}) {
      SCOPED_TRACE(fmt::format("memory {}, step {}", memory, step));
      expect_old_or_new(step, [&](const fs::path& root, std::int64_t at) {
        return save_behind(root, at, "new", Bytes{memory}).has_value();
      });
    }
  }
}

TEST(Crash, WhilePruningLeavesTheNewestAndNothingHalf) {
  bool crashed = true;
  int operations = 0;
  for (; crashed; ++operations) {
    const TempFolder folder;
    for (const std::int64_t step : {1, 2, 3}) ASSERT_TRUE(save(folder.path(), step, "w"));
    crashed = crashes(operations, [&] { return prune(folder.path(), 1).has_value(); });
    const auto checkpoints = list_checkpoints(folder.path());
    ASSERT_TRUE(checkpoints);
    ASSERT_FALSE(checkpoints->empty());
    EXPECT_EQ(checkpoints->front().step, 3);
    for (const auto& checkpoint : *checkpoints) EXPECT_TRUE(verify(checkpoint.path));
  }
  EXPECT_GT(operations, 6);
}

// A power cut forgets what was not synced: every file is synced after its last write and before it
// gets its name, every folder after the last change in it and before its own rename, the root last.
TEST(Crash, NothingIsNamedBeforeItIsOnTheDisk) {
  const TempFolder folder;
  std::vector<std::string> log;
  watch = {.log = &log};
  const auto saved = save(folder.path(), 1, "w");
  watch = {};
  ASSERT_TRUE(saved);
  const auto last = [&](const std::string& entry, std::size_t before) {
    for (std::size_t i = before; i-- > 0;) {
      if (log[i].starts_with(entry)) return static_cast<int>(i);
    }
    return -1;
  };
  const std::string pending = pending_folder(folder.path(), 1, 0).string();
  int renames = 0;
  for (std::size_t i = 0; i < log.size(); ++i) {
    if (!log[i].starts_with("rename ")) continue;
    ++renames;
    const std::string from = log[i].substr(7, log[i].find(' ', 7) - 7);
    EXPECT_GT(last("fsync " + from, i), last("write " + from, i)) << log[i];
    EXPECT_GE(last("fsync " + from, i), 0) << log[i];
    if (from == pending) {
      EXPECT_GT(last("fsync " + pending, i), last("rename " + pending + "/", i));
      ASSERT_LT(i + 1, log.size());
      EXPECT_EQ(log[i + 1], "fsync " + fs::canonical(folder.path()).string());
    }
  }
  EXPECT_EQ(renames, 4) << "two layers, the manifest, the folder";
}

// Does with files what a run does, and returns what fails first.
std::string first_failure(const fs::path& folder) {
  const fs::path root = folder / "checkpoints";
  const fs::path file = folder / "file";
  for (const char* text : {"old", "new"}) {
    const auto written = write_file_durably(file, text);
    if (!written) return written.error().message;
  }
  if (*read_file(file) != "new") return "another content of the file";
  for (const std::int64_t step : {1, 2, 3, 3}) {
    const auto saved = save(root, step, "w");
    if (!saved) return saved.error().message;
  }
  const auto pruned = prune(root, 2);
  if (!pruned) return pruned.error().message;
  const auto newest = newest_verified(root, nullptr);
  if (!newest) return newest.error().message;
  if (newest->manifest.step != 3 || list_checkpoints(root)->size() != 2) return "other checkpoints";
  const auto lock = process::FileLock::take(folder / "run.lock");
  if (!lock) return lock.error().message;
  if (process::FileLock::take(folder / "run.lock")) return "two hold one lock";
  if (!write_file_durably(file, "line\nhalf")) return "lines";
  const auto cut = cut_torn_line(file);
  if (!cut) return cut.error().message;
  return *read_file(file) == "line\n" ? "" : "half a line is left";
}

std::vector<std::string> notes;  // that were shown

// CIFS, sshfs, NFS without locks, FUSE with direct I/O, 9p, overlays: what they answer.
TEST(LesserDisk, WhatAFileSystemDoesNotOfferIsSaidOnceAndStopsNothing) {
  const std::vector<std::pair<Call, std::vector<int>>> calls = {
      {Call::kNone, {0}},
      {Call::kSyncFile, {EINVAL, ENOSYS, ENOTSUP}},
      {Call::kSyncFolder, {EINVAL, ENOSYS, ENOTSUP, EACCES, EPERM, EISDIR}},
      {Call::kReplaceFile, {EPERM, EACCES, EEXIST, EBUSY}},
      {Call::kRenameFolder, {EXDEV, EACCES, EPERM}},
      {Call::kExchange, {EINVAL, ENOSYS, ENOTSUP}},
      {Call::kLock, {ENOLCK, ENOSYS, ENOTSUP, EINVAL}},
      {Call::kTruncate, {EINVAL, ENOSYS, ENOTSUP}}};
  notes.clear();
  show_notes_by([](std::string_view line) { notes.emplace_back(line); });
  for (const auto& [call, errors] : calls) {
    for (const int error : errors) {
      const TempFolder folder;
      refusal = {call, error};
      const std::string failure = first_failure(folder.path());
      refusal = {};
      EXPECT_EQ(failure, "") << "call " << static_cast<int>(call) << ", errno " << error;
    }
  }
  show_notes_by(nullptr);
  // Syncing a file, a folder, replacing a file, locks. The others guarantee the same.
  ASSERT_EQ(notes.size(), 4U) << fmt::format("{}", fmt::join(notes, "\n"));
  for (const std::string& note : notes) EXPECT_NE(note.find("this file system"), std::string::npos);
}

TEST(LesserDisk, ADiskThatFailsIsNotTakenForOneThatOffersLess) {
  for (const Call call :
       {Call::kSyncFile, Call::kSyncFolder, Call::kReplaceFile, Call::kTruncate}) {
    for (const int error : {EIO, ENOSPC, EROFS}) {
      const TempFolder folder;
      refusal = {call, error};
      const std::string failure = first_failure(folder.path());
      refusal = {};
      EXPECT_NE(failure.find(std::strerror(error)), std::string::npos)
          << "call " << static_cast<int>(call) << ": " << failure;
    }
  }
}

}  // namespace
}  // namespace dynmo::checkpoint
