// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/processors.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <fstream>

namespace dynmo::process {
namespace {

namespace fs = std::filesystem;

// A folder that looks like the root of a machine.
class Machine {
 public:
  Machine() : root_(fs::temp_directory_path() / ("dynmo-processors-" + std::to_string(getpid()))) {
    fs::remove_all(root_);
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  ~Machine() { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  [[nodiscard]] const fs::path& root() const { return root_; }

 private:
  fs::path root_;
};

constexpr const char* kVersion2 =
    "25 1 0:22 / /proc rw - proc proc rw\n"
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";

TEST(Processors, QuotaIsTheLeastOfTheGroupAndThoseAroundIt) {
  const Machine machine;
  machine.write("proc/self/mountinfo", kVersion2);
  machine.write("proc/self/cgroup", "0::/job/step\n");
  machine.write("sys/fs/cgroup/job/step/cpu.max", "max 100000\n");
  EXPECT_FALSE(cpu_quota(machine.root()));
  machine.write("sys/fs/cgroup/job/cpu.max", "250000 100000\n");
  EXPECT_DOUBLE_EQ(*cpu_quota(machine.root()), 2.5);
  machine.write("sys/fs/cgroup/job/step/cpu.max", "400000 100000\n");
  EXPECT_DOUBLE_EQ(*cpu_quota(machine.root()), 2.5);
  machine.write("sys/fs/cgroup/job/step/cpu.max", "150000 100000\n");
  EXPECT_DOUBLE_EQ(*cpu_quota(machine.root()), 1.5);
}

TEST(Processors, QuotaOfAContainerThatSeesOnlyItsOwnGroup) {
  const Machine machine;
  // The mount shows /docker/a as its root; /proc names the group as the host does.
  machine.write("proc/self/mountinfo",
                "30 23 0:26 /docker/a /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
  machine.write("proc/self/cgroup", "0::/docker/a\n");
  machine.write("sys/fs/cgroup/cpu.max", "200000 100000\n");
  EXPECT_DOUBLE_EQ(*cpu_quota(machine.root()), 2);
  machine.write("proc/self/cgroup", "0::/../b\n");
  EXPECT_DOUBLE_EQ(*cpu_quota(machine.root()), 2);
}

TEST(Processors, QuotaOfVersion1) {
  const Machine machine;
  machine.write("proc/self/mountinfo",
                "33 25 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                "34 25 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n");
  machine.write("proc/self/cgroup", "5:memory:/m\n4:cpu,cpuacct:/job\n");
  machine.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
  machine.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  EXPECT_FALSE(cpu_quota(machine.root()));
  machine.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "300000\n");
  EXPECT_DOUBLE_EQ(*cpu_quota(machine.root()), 3);
}

TEST(Processors, UsableAreTheCoresLimitedByTheQuota) {
  const std::vector<int> cores = {3, 5, 8, 9};
  EXPECT_EQ((Processors{cores, std::nullopt}.usable()), 4);
  EXPECT_EQ((Processors{cores, 16}.usable()), 4);
  EXPECT_EQ((Processors{cores, 2.9}.usable()), 2);
  EXPECT_EQ((Processors{cores, 1.995}.usable()), 2);
  EXPECT_EQ((Processors{cores, 0.5}.usable()), 1);
  EXPECT_EQ((Processors{cores, 2}.to_pin()), (std::vector<int>{3, 5}));
}

TEST(Processors, OneHyperThreadOfEachCoreComesFirst) {
  const Machine machine;
  for (int core = 0; core < 4; ++core) {
    machine.write(
        "sys/devices/system/cpu/cpu" + std::to_string(core) + "/topology/thread_siblings_list",
        core % 2 == 0 ? "0,2\n" : "1,3\n");
  }
  EXPECT_EQ(physical_cores_first({0, 1, 2, 3}, machine.root()), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(physical_cores_first({0, 2, 3}, machine.root()), (std::vector<int>{0, 3, 2}));
  EXPECT_EQ(physical_cores_first({7, 6}, machine.root()), (std::vector<int>{7, 6}));
}

TEST(Processors, OfThisProcessAreThoseOfItsMask) {
  const Processors here = usable_processors();
  ASSERT_FALSE(here.cores.empty());
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<std::size_t>(here.cores.back()), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(usable_processors().cores, std::vector<int>{here.cores.back()});
  EXPECT_EQ(usable_processors().usable(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

}  // namespace
}  // namespace dynmo::process
