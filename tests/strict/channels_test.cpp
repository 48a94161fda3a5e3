// SPDX-License-Identifier: Apache-2.0
// Channels between devices, on the strict device with groups in the place of NCCL's: mistakes of
// order, waits for a lost rank, and what is left behind.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "dynmo/c10d/device_kinds.h"
#include "dynmo/core/check.h"
#include "dynmo/transport/in_process.h"
#include "tests/strict/strict_channels.h"
#include "tests/support/strict_device/strict_device.h"

namespace dynmo::strict {
namespace {

using c10d::Channel;
using c10d::ChannelTransport;
using transport::Member;
using transport::Transport;

constexpr std::int64_t kNumbers = 1000;
const std::vector<Channel> kOne = {{WorldRank(0), WorldRank(1), 3}};

c10::intrusive_ptr<::c10d::Store> new_words() { return c10::make_intrusive<::c10d::HashStore>(); }

std::span<std::byte> device_bytes(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

at::Tensor on_device(double value) {
  return at::full({kNumbers}, value, at::device(strict::open(0)).dtype(at::kFloat));
}

// Waits until it holds. A test that is stopped by its limit has not seen it.
void until(const std::function<bool()>& holds) {
  while (!holds()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

std::size_t entries(const char* folder) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    static_cast<void>(entry);
    ++count;
  }
  return count;
}

class StrictChannels : public ::testing::Test {
 protected:
  void SetUp() override {
    strict::open(0);
    if (strict::mode() == strict::Mode::kLate) GTEST_SKIP() << "the groups are for the other mode";
  }
};

// Runs `work` on two ranks with one open channel from 0 to 1.
void on_a_channel(const std::function<void(ChannelTransport&, Transport&)>& work) {
  const auto words = new_words();
  const auto done = transport::run_ranks(2, [&](Transport& group) -> Expected<void> {
    ChannelTransport channels(
        dynmo::testing::strict_channel_options(group, strict::open(0), words));
    DYNMO_TRY(channels.open(kOne));
    work(channels, group);
    return {};
  });
  ASSERT_TRUE(done) << done.error().message;
}

std::string fault_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "none";
}

TEST_F(StrictChannels, AReceiveThatIsReadTooEarlyIsFound) {
  std::atomic<bool> is_read = false;
  on_a_channel([&is_read](ChannelTransport& channels, Transport& group) {
    if (group.rank() == Member(0)) {
      const at::Tensor sent = on_device(4);
      EXPECT_TRUE(channels.send(Member(1), 3, device_bytes(sent))->wait());
      until([&is_read] { return is_read.load(); });  // close() waits, and threads share a clock
      EXPECT_TRUE(channels.close());
      return;
    }
    const at::Tensor received = on_device(0);
    const auto operation = channels.receive(Member(0), 3, device_bytes(received));
    EXPECT_NE(fault_of([&] {
                static_cast<void>(received.add(1));
              }).find("reads memory that receive of stream"),
              std::string::npos);
    is_read = true;
    EXPECT_TRUE(operation->wait());
    EXPECT_EQ(received.sum().item<float>(), 4.0F * kNumbers);
    EXPECT_TRUE(channels.close());
  });
}

TEST_F(StrictChannels, ABufferThatIsWrittenWhileItIsSentIsFound) {
  std::atomic<bool> is_written = false;
  on_a_channel([&is_written](ChannelTransport& channels, Transport& group) {
    if (group.rank() == Member(1)) {
      const at::Tensor received = on_device(0);
      EXPECT_TRUE(channels.receive(Member(0), 3, device_bytes(received))->wait());
      until([&is_written] { return is_written.load(); });
      EXPECT_TRUE(channels.close());
      return;
    }
    const at::Tensor sent = on_device(4);
    const auto operation = channels.send(Member(1), 3, device_bytes(sent));
    EXPECT_NE(fault_of([&] { sent.fill_(1); }).find("writes memory that send of stream"),
              std::string::npos);
    is_written = true;
    EXPECT_TRUE(operation->wait());
    sent.fill_(1);
    EXPECT_TRUE(channels.close());
  });
}

TEST_F(StrictChannels, OneOfTheGroupBeforeIsFound) {
  on_a_channel([](ChannelTransport& channels, Transport&) {
    EXPECT_TRUE(channels.close());
    const at::Tensor tensor = on_device(1);
    EXPECT_THROW((void)channels.send(Member(1), 3, device_bytes(tensor)), CheckFailure);
  });
}

// The call in which a rank waits when its peer is lost.
enum class Lost { kReceive, kSend, kClose, kConnect };
struct LostCell {
  const char* name;
  Lost waits_for;
};
class ALostPeer : public StrictChannels, public ::testing::WithParamInterface<LostCell> {};

// The wait ends by the abort alone: the group spins when its peer has ended.
TEST_P(ALostPeer, IsWaitedForUntilTheAbort) {
  const Lost waits_for = GetParam().waits_for;
  const Error lost{ErrorCode::kPeerLost, "rank 1 was lost"};
  const auto words = new_words();
  const auto groups = transport::make_in_process_group(2);
  std::atomic<bool> failed = false;
  auto options = dynmo::testing::strict_channel_options(*groups[0], strict::open(0), words);
  options.failure = [&] { return failed ? std::optional(lost) : std::nullopt; };
  ChannelTransport mine(options);
  const std::vector<Channel> both = {{WorldRank(1), WorldRank(0), 3},
                                     {WorldRank(0), WorldRank(1), 4}};
  std::atomic<bool> connects = false;
  if (waits_for == Lost::kConnect) {
    std::jthread fails([&] {
      until([&] { return words->check({"0/0-1-4/port"}); });  // it listens, and no rank comes
      failed = true;
    });
    // (This store knows no loss. The thread is left where it is, and ends when a rank comes.)
    EXPECT_EQ(mine.open(std::span(both).last(1)).error(), lost);
    auto late = strict::connect_pair(c10::make_intrusive<::c10d::PrefixStore>("0/0-1-4", words), 1,
                                     strict::open(0));
    return;
  }
  {
    ChannelTransport theirs(
        dynmo::testing::strict_channel_options(*groups[1], strict::open(0), words));
    std::jthread opens([&] { EXPECT_TRUE(theirs.open(both)); });
    ASSERT_TRUE(mine.open(both));
  }
  const at::Tensor tensor = on_device(2);
  std::unique_ptr<transport::Operation> operation;
  if (waits_for == Lost::kReceive) {
    operation = mine.receive(Member(1), 3, device_bytes(tensor));
  } else {
    operation = mine.send(Member(1), 4, device_bytes(tensor));
  }
  std::jthread fails([&] {
    until([] { return strict::pairs_that_spin() == 1; });
    failed = true;
  });
  if (waits_for == Lost::kClose) {
    const auto closed = mine.close();
    ASSERT_FALSE(closed);
    EXPECT_EQ(closed.error(), lost);
    EXPECT_FALSE(operation->wait());
  } else {
    const auto waited = operation->wait();
    ASSERT_FALSE(waited);
    EXPECT_EQ(waited.error(), lost);
  }
  mine.abort(lost);
  EXPECT_EQ(strict::pairs_that_spin(), 0);
  EXPECT_EQ(mine.open(both).error().code, ErrorCode::kPeerLost);
}

INSTANTIATE_TEST_SUITE_P(While, ALostPeer,
                         ::testing::Values(LostCell{"it_receives", Lost::kReceive},
                                           LostCell{"it_sends", Lost::kSend},
                                           LostCell{"it_closes", Lost::kClose},
                                           LostCell{"it_connects", Lost::kConnect}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_F(StrictChannels, LeaveNoThreadAndNoDescriptor) {
  const auto generation = [](bool is_lost) {
    const auto words = new_words();
    const auto done = transport::run_ranks(2, [&](Transport& group) -> Expected<void> {
      ChannelTransport channels(
          dynmo::testing::strict_channel_options(group, strict::open(0), words));
      DYNMO_TRY(channels.open(kOne));
      if (!is_lost) return channels.close();
      channels.abort({ErrorCode::kPeerLost, "rank 1 was lost"});
      return {};
    });
    EXPECT_TRUE(done);
  };
  generation(false);
  const std::size_t descriptors = entries("/proc/self/fd");
  const std::size_t threads = entries("/proc/self/task");
  // More streams than the device has, if they did not serve again.
  for (int i = 0; i < 80; ++i) generation(i % 2 == 1);
  EXPECT_LE(entries("/proc/self/fd"), descriptors);
  EXPECT_LE(entries("/proc/self/task"), threads);
}

TEST_F(StrictChannels, MemoryThatIsKeptForLaterIsGivenBack) {
  const std::int64_t before = strict::caches_emptied();
  c10d::free_cached_memory(at::kCPU);
  EXPECT_EQ(strict::caches_emptied(), before);
  c10d::free_cached_memory(strict::open(0));
  EXPECT_EQ(strict::caches_emptied(), before + 1);
}

}  // namespace
}  // namespace dynmo::strict
