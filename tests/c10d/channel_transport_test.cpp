// SPDX-License-Identifier: Apache-2.0
// Messages by groups of two ranks, as they pass between devices, here with groups made of ranks as
// threads: which channels are opened, in which order, and the same bits as without.
#include "dynmo/c10d/channel_transport.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <latch>
#include <memory>
#include <set>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::c10d {
namespace {

using runtime::bytes_of;
using runtime::testing::RunOptions;
using runtime::testing::RunResult;
using schedule::ScheduleKind;
using transport::Tag;
using transport::Transport;

class FakeWork final : public ::c10d::Work {
 public:
  explicit FakeWork(std::unique_ptr<transport::Operation> operation)
      : operation_(std::move(operation)) {}
  bool wait(std::chrono::milliseconds) override { return operation_->wait().has_value(); }

 private:
  std::unique_ptr<transport::Operation> operation_;
};

// A communicator as NCCL's are: no tags, one order; made when both ranks have come. Its messages
// travel on a tag of the ranks' other transport.
class FakePair final : public ::c10d::Backend {
 public:
  FakePair(Transport& transport, const Channel& channel)
      : ::c10d::Backend(channel.from.value == transport.rank().value ? 0 : 1, 2),
        transport_(transport),
        channel_(channel) {
    const std::byte mine{1};
    std::byte theirs{};
    const auto received = transport.receive(other(), channel.tag, std::span(&theirs, 1));
    const auto sent = transport.send(other(), channel.tag, std::span(&mine, 1));
    TORCH_CHECK(received->wait() && sent->wait(), "the other rank does not come");
  }

  c10::intrusive_ptr<::c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int) override {
    TORCH_CHECK(to == 1 && getRank() == 0, "a channel has one direction");
    return c10::make_intrusive<FakeWork>(
        transport_.send(other(), channel_.tag, bytes_of(tensors.front())));
  }
  c10::intrusive_ptr<::c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int) override {
    TORCH_CHECK(from == 0 && getRank() == 1, "a channel has one direction");
    return c10::make_intrusive<FakeWork>(
        transport_.receive(other(), channel_.tag, bytes_of(tensors.front())));
  }
  void abort() override { aborted = true; }
  void shutdown() override { closed = true; }

  std::atomic<bool> aborted = false;
  std::atomic<bool> closed = false;

 private:
  [[nodiscard]] transport::Member other() const {
    const bool sends = channel_.from.value == transport_.rank().value;
    return transport::Member((sends ? channel_.to : channel_.from).value);
  }

  Transport& transport_;
  Channel channel_;
};

// Pairs on tags that nobody else uses. Records what was opened.
ChannelOptions fake_channels(Transport& transport, std::vector<Channel>& opened) {
  return {.rank = WorldRank(transport.rank().value),
          .size = transport.size(),
          .connect = [&transport, &opened](const Channel& channel, int) {
            opened.push_back(channel);
            constexpr Tag kOwn = 1 << 30;
            return c10::make_intrusive<FakePair>(
                transport, Channel{channel.from, channel.to, channel.tag + kOwn});
          }};
}

TEST(ChannelTransport, OpensWhatIsNewAndItsOwnInTheGivenOrder) {
  const std::vector<Channel> first = {{WorldRank(0), WorldRank(1), 3},
                                      {WorldRank(1), WorldRank(0), 4}};
  const std::vector<Channel> second = {{WorldRank(0), WorldRank(1), 3},
                                       {WorldRank(2), WorldRank(0), 5},
                                       {WorldRank(2), WorldRank(1), 6}};
  std::vector<std::vector<Channel>> opened(3);
  const auto done = transport::run_ranks(3, [&](Transport& transport) -> Expected<void> {
    ChannelTransport channels(fake_channels(transport, opened[transport.rank().index()]));
    DYNMO_TRY(channels.open(first));
    return channels.open(second);
  });
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(opened[0], (std::vector<Channel>{first[0], first[1], second[1]}));
  EXPECT_EQ(opened[1], (std::vector<Channel>{first[0], first[1], second[2]}));
  EXPECT_EQ(opened[2], (std::vector<Channel>{second[1], second[2]}));
}

TEST(ChannelTransport, RefusesAChannelThatIsNotOpen) {
  const auto group = transport::make_in_process_group(2);
  std::vector<Channel> opened;
  ChannelTransport channels(fake_channels(*group[0], opened));
  std::byte byte{};
  EXPECT_THROW((void)channels.send(transport::Member(1), 3, std::span(&byte, 1)), CheckFailure);
}

// A device would wait for the lost rank forever.
TEST(ChannelTransport, FailsAndAbortsItsGroupsWhenTheOtherTransportHas) {
  const std::vector<Channel> both = {{WorldRank(0), WorldRank(1), 3}};
  const Error lost{ErrorCode::kPeerLost, "rank 1 was lost"};
  const auto done = transport::run_ranks(2, [&](Transport& transport) -> Expected<void> {
    std::atomic<bool> failed = false;
    std::vector<Channel> opened;
    ChannelOptions options = fake_channels(transport, opened);
    FakePair* made = nullptr;
    c10::intrusive_ptr<::c10d::Backend> kept;
    options.connect = [&, connect = options.connect](const Channel& channel, int opening) {
      kept = connect(channel, opening);
      made = static_cast<FakePair*>(kept.get());
      return kept;
    };
    options.failure = [&] { return failed ? std::optional(lost) : std::nullopt; };
    ChannelTransport channels(std::move(options));
    DYNMO_TRY(channels.open(both));
    failed = true;
    std::byte byte{};
    while (channels.open(both).has_value()) std::this_thread::yield();
    EXPECT_EQ(channels.open(both).error(), lost);
    channels.abort(lost);  // returns when it is done
    EXPECT_TRUE(made->aborted);
    if (transport.rank() == transport::Member(0)) {
      EXPECT_EQ(channels.send(transport::Member(1), 3, std::span(&byte, 1))->wait().error(), lost);
    }
    return {};
  });
  ASSERT_TRUE(done) << done.error().message;
}

TEST(ChannelTransport, ClosesWhatIsOpenAndOpensItAgain) {
  const std::vector<Channel> one = {{WorldRank(0), WorldRank(1), 3}};
  const auto done = transport::run_ranks(2, [&](Transport& transport) -> Expected<void> {
    std::vector<Channel> opened;
    std::vector<int> openings;
    std::vector<c10::intrusive_ptr<::c10d::Backend>> made;
    ChannelOptions options = fake_channels(transport, opened);
    options.connect = [&, connect = options.connect](const Channel& channel, int opening) {
      openings.push_back(opening);
      return made.emplace_back(connect(channel, opening));
    };
    ChannelTransport channels(std::move(options));
    const bool sends = transport.rank() == transport::Member(0);
    std::array<std::byte, 3> bytes = {};
    const auto pass = [&]() -> Expected<void> {
      if (sends) {
        bytes.fill(std::byte{7});
        return channels.send(transport::Member(1), 3, bytes)->wait();
      }
      DYNMO_TRY(channels.receive(transport::Member(0), 3, bytes)->wait());
      EXPECT_EQ(bytes[2], std::byte{7});
      return {};
    };
    DYNMO_TRY(channels.open(one));
    DYNMO_TRY(pass());
    DYNMO_TRY(channels.close());
    EXPECT_TRUE(static_cast<FakePair*>(made.front().get())->closed);
    EXPECT_FALSE(static_cast<FakePair*>(made.front().get())->aborted);
    // A channel of before the change is none after it.
    EXPECT_THROW((void)pass(), CheckFailure);
    DYNMO_TRY(channels.open(one));
    EXPECT_EQ(openings, (std::vector{0, 1}));
    DYNMO_TRY(pass());
    return channels.close();
  });
  ASSERT_TRUE(done) << done.error().message;
}

// Groups of which each is aborted only when all are: a kernel of one waits behind one of another.
TEST(ChannelTransport, AbortsAllGroupsAtOnce) {
  constexpr int kGroups = 3;
  struct Linked final : ::c10d::Backend {
    explicit Linked(std::shared_ptr<std::latch> all)
        : ::c10d::Backend(0, 2), together(std::move(all)) {}
    void abort() override {
      together->arrive_and_wait();
      aborted = true;
    }
    std::shared_ptr<std::latch> together;
    std::atomic<bool> aborted = false;
  };
  const auto together = std::make_shared<std::latch>(kGroups);
  std::vector<c10::intrusive_ptr<Linked>> made;
  ChannelTransport channels({.rank = WorldRank(0), .size = 2, .connect = [&](const Channel&, int) {
                               return made.emplace_back(c10::make_intrusive<Linked>(together));
                             }});
  std::vector<Channel> all;
  for (Tag tag = 0; tag < kGroups; ++tag) all.push_back({WorldRank(0), WorldRank(1), tag});
  ASSERT_TRUE(channels.open(all));
  channels.abort({ErrorCode::kPeerLost, "rank 1 was lost"});
  for (const auto& group : made) EXPECT_TRUE(group->aborted);
}

// NCCL's own connecting knows no end when the other rank does not come.
TEST(ChannelTransport, LeavesAChannelThatDoesNotConnectWhenTheOtherTransportFails) {
  const Error lost{ErrorCode::kPeerLost, "rank 1 was lost"};
  struct Held {
    std::latch connects{1};
    std::latch go_on{1};
    std::latch ended{1};
  };
  const auto held = std::make_shared<Held>();
  {
    ChannelTransport channels(
        {.rank = WorldRank(0),
         .size = 2,
         .connect = [held](const Channel&, int) -> c10::intrusive_ptr<::c10d::Backend> {
           held->connects.count_down();
           held->go_on.wait();
           held->ended.count_down();
           TORCH_CHECK(false, "the other rank did not come");
         },
         // It tells only the caller of open(), not the thread that watches.
         .failure = [&, caller = std::this_thread::get_id()]() -> std::optional<Error> {
           if (std::this_thread::get_id() != caller || !held->connects.try_wait()) return {};
           return lost;
         }});
    const std::vector<Channel> one = {{WorldRank(0), WorldRank(1), 3}};
    EXPECT_EQ(channels.open(one).error(), lost);
    EXPECT_EQ(channels.failure(), lost);
  }
  held->go_on.count_down();
  held->ended.wait();
}

TEST(ChannelTransport, NamesTheTwoRanksBetweenWhichThereIsNoChannel) {
  ChannelTransport channels(
      {.rank = WorldRank(2),
       .size = 4,
       .connect = [](const Channel&, int) -> c10::intrusive_ptr<::c10d::Backend> {
         throw std::runtime_error("no route\nand more");
       }});
  const auto refused = [&](int from, int to) {
    const std::vector<Channel> one = {{WorldRank(from), WorldRank(to), 3}};
    return channels.open(one).error();
  };
  EXPECT_EQ(refused(2, 1),
            (Error{ErrorCode::kPeerLost, "no channel between rank 2 and rank 1: no route"}));
  EXPECT_EQ(refused(3, 2),
            (Error{ErrorCode::kPeerLost, "no channel between rank 2 and rank 3: no route"}));
}

TEST(ChannelTransport, ChangesNoBitOfAPipelineThatMovesToOtherPlacements) {
  RunOptions run{.steps = 8, .replicas = 2, .cut = {3, 2, 3}};
  run.before_step = [](runtime::Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step == 0) return {};
    Rng rng(mix_key({static_cast<std::uint64_t>(step), 99}));
    const ScheduleKind kinds[] = {ScheduleKind::kZbV, ScheduleKind::kInterleaved,
                                  ScheduleKind::k1F1B, ScheduleKind::kAdaptive};
    const plan::Plan plan = runtime::testing::random_plan(rng, kinds[step % 4], 8, 3, 4, step);
    if (!plan::schedule_of(plan, 4, 0)) return {};
    DYNMO_ASSIGN(const bool moved, pipeline.apply(plan));
    EXPECT_TRUE(moved);
    return {};
  };
  const RunResult expected = runtime::testing::run_pipeline(run);
  std::vector<std::vector<Channel>> opened(6);
  run.channels = [&](Transport& transport) {
    return std::make_unique<ChannelTransport>(
        fake_channels(transport, opened[transport.rank().index()]));
  };
  const RunResult actual = runtime::testing::run_pipeline(run);
  ASSERT_TRUE(expected.status) << expected.status.error().message;
  ASSERT_TRUE(actual.status) << actual.status.error().message;
  EXPECT_EQ(actual.losses, expected.losses);
  EXPECT_EQ(actual.states, expected.states);
  EXPECT_EQ(actual.gradients, expected.gradients);
  for (const std::vector<Channel>& own : opened) {
    EXPECT_GT(own.size(), 2U);
    EXPECT_EQ(std::set<Channel>(own.begin(), own.end()).size(), own.size()) << "opened once";
  }
}

}  // namespace
}  // namespace dynmo::c10d
