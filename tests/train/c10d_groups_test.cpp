// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/c10d_groups.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "dynmo/process/sockets.h"
#include "dynmo/transport/gather.h"

namespace dynmo::train {
namespace {

constexpr int kGroupRanks = 3;

// Ranks as threads, each with a control plane and a Gloo group of its own.
TEST(C10dGroups, WhoIsLostInTheGroupInForceIsNotWaitedForInTheNext) {
  auto listener = process::listen_on("127.0.0.1", 0);
  ASSERT_TRUE(listener) << listener.error().message;
  const std::uint16_t port = process::local_port(*listener);
  elastic::View view{.generation = 2};
  for (int rank = 0; rank < kGroupRanks; ++rank) {
    elastic::Member member = this_member();
    member.number = rank;
    view.members.push_back(member);
  }
  std::array<std::atomic<bool>, kGroupRanks> waits = {};
  std::array<std::optional<Error>, kGroupRanks> ended;
  elastic::Place place;
  std::atomic<bool> opened{false};
  const auto run = [&](int rank) {
    const auto self = static_cast<std::size_t>(rank);
    c10d::GroupOptions options{.rank = WorldRank(rank), .size = kGroupRanks, .port = port};
    if (rank == 0) options.store_fd = listener->release();
    auto groups = C10dGroups::join(options, view.members[self], {});
    ASSERT_TRUE(groups) << groups.error().message;
    if (rank == 2) {  // is lost when the others wait for it
      waits[0].wait(false);
      waits[1].wait(false);
      return;
    }
    if (rank == 0) {
      const auto open = (*groups)->open(view);
      ASSERT_TRUE(open) << open.error().message;
      place = *open;
      opened = true;
      opened.notify_all();
    }
    opened.wait(false);
    const auto formed = (*groups)->form(view, place, [&]() -> std::optional<Error> {
      waits[self] = true;
      waits[self].notify_all();
      return std::nullopt;
    });
    ASSERT_FALSE(formed);
    ended[self] = formed.error();
    (*groups)->drop(formed.error());
    // Another rank may have told it that the next group does not form.
    for (int tries = 0; tries < 1000 && !(*groups)->failure(); ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_TRUE((*groups)->failure()) << "rank " << rank;
    (*groups)->in_force()->abort(formed.error());
  };
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < kGroupRanks; ++rank) threads.emplace_back(run, rank);
  threads.clear();
  for (const std::size_t rank : {0U, 1U}) {
    ASSERT_TRUE(ended[rank]);
    // Otherwise: "1 of 3 ranks did not join", when the time for it has passed.
    EXPECT_TRUE(ended[rank]->message.starts_with("rank 2 "))
        << "rank " << rank << ": " << ended[rank]->message;
  }
}

}  // namespace
}  // namespace dynmo::train
