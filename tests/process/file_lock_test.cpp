// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/file_lock.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <memory>
#include <vector>

#include "tests/support/temp_folder.h"

namespace dynmo::process {
namespace {

std::filesystem::path lock_in(const TempFolder& folder) { return folder.path() / "run.lock"; }

// A process that takes the lock, says so through a pipe, and waits to be killed.
class Holder {
 public:
  explicit Holder(const std::filesystem::path& path) {
    std::array<int, 2> ready{};
    EXPECT_EQ(::pipe(ready.data()), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      const auto lock = FileLock::take(path);
      const char taken = lock ? 'y' : 'n';
      (void)!::write(ready[1], &taken, 1);
      while (true) ::pause();
    }
    ::close(ready[1]);
    EXPECT_EQ(::read(ready[0], &taken_, 1), 1);
    ::close(ready[0]);
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;
  ~Holder() { end(); }
  void end() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  [[nodiscard]] bool took() const { return taken_ == 'y'; }
  [[nodiscard]] pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  char taken_ = 0;
};

TEST(FileLock, LetsASecondProcessInOnlyAfterTheFirst) {
  const TempFolder folder;
  Holder first(lock_in(folder));
  ASSERT_TRUE(first.took());
  const auto refused = FileLock::take(lock_in(folder));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
  EXPECT_TRUE(refused.error().message.starts_with(fmt::format(
      "in use by another run: process {} on {}, since 20", first.pid(), this_process().host)))
      << refused.error().message;
  EXPECT_FALSE(Holder(lock_in(folder)).took());

  first.end();  // killed: it could not remove the file
  EXPECT_TRUE(std::filesystem::exists(lock_in(folder)));
  EXPECT_TRUE(FileLock::take(lock_in(folder)));
}

TEST(FileLock, IsHeldByThisProcessOnceAndLeavesNoFile) {
  const TempFolder folder;
  {
    const auto lock = FileLock::take(lock_in(folder));
    ASSERT_TRUE(lock);
    EXPECT_FALSE(FileLock::take(lock_in(folder)));
    EXPECT_FALSE(Holder(lock_in(folder)).took());
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  EXPECT_TRUE(Holder(lock_in(folder)).took());
}

TEST(FileLock, IsTakenOverFromWhateverStoodInItsFile) {
  const TempFolder folder;
  for (const char* text : {"", "{", "{\"format\":\"dynmo-lock-1\",\"pid\":1}"}) {
    folder.write("run.lock", text);
    EXPECT_TRUE(FileLock::take(lock_in(folder))) << text;
  }
}

TEST(FileLock, OneOfManyAtOnceGetsIt) {
  const TempFolder folder;
  for (int round = 0; round < 20; ++round) {
    std::vector<std::unique_ptr<Holder>> holders;
    for (int i = 0; i < 3; ++i) holders.push_back(std::make_unique<Holder>(lock_in(folder)));
    EXPECT_EQ(std::ranges::count_if(holders, [](const auto& one) { return one->took(); }), 1);
  }
}

TEST(FileLock, TellsAProcessThatIsGone) {
  LockHolder holder = this_process();
  EXPECT_FALSE(is_gone(holder));
  holder.start_ticks -= 1;  // its number was given to another since
  EXPECT_TRUE(is_gone(holder));
  holder = this_process();
  holder.boot_id = "of another boot";
  EXPECT_TRUE(is_gone(holder));
  holder.host = "elsewhere";  // nobody can know
  EXPECT_FALSE(is_gone(holder));
}

TEST(FileLock, NamesAFolderThatItCannotWriteTo) {
  const auto lock = FileLock::take("/proc/nowhere/run.lock");
  ASSERT_FALSE(lock);
  EXPECT_TRUE(lock.error().message.starts_with("cannot create '/proc/nowhere/run.lock': "));
}

}  // namespace
}  // namespace dynmo::process
