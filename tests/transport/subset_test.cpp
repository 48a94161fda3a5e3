// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "dynmo/core/check.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/in_process.h"

namespace dynmo::transport {
namespace {

std::vector<WorldRank> ranks(std::initializer_list<int> values) {
  std::vector<WorldRank> result;
  for (const int value : values) result.emplace_back(value);
  return result;
}

// Returns the names of the members of this rank's subset, as they report them.
Expected<std::vector<int>> names(Transport& group, Transport& part) {
  const std::byte mine{static_cast<unsigned char>(group.rank().value)};
  DYNMO_ASSIGN(const auto all, all_gather(part, 3, std::span(&mine, 1)));
  std::vector<int> result;
  for (const auto& bytes : all) result.push_back(std::to_integer<int>(bytes[0]));
  return result;
}

TEST(Subset, NumbersItsMembersInTheOrderGiven) {
  const auto done = run_ranks(6, [](Transport& group) -> Expected<void> {
    const std::vector<WorldRank> members =
        group.rank().value % 2 == 0 ? ranks({4, 0, 2}) : ranks({1, 3, 5});
    const auto part = subset(group, members);
    EXPECT_EQ(part->size(), 3);
    EXPECT_EQ(members[part->rank().index()].value, group.rank().value);
    DYNMO_ASSIGN(const std::vector<int> seen, names(group, *part));
    EXPECT_EQ(seen, group.rank().value % 2 == 0 ? std::vector({4, 0, 2}) : std::vector({1, 3, 5}));
    return {};
  });
  EXPECT_TRUE(done.has_value()) << done.error().message;
}

// Rows and columns of a grid share no pair of ranks, so they may use one tag at the same time.
TEST(Subset, RowsAndColumnsOfAGridDoNotMeet) {
  const auto done = run_ranks(6, [](Transport& group) -> Expected<void> {
    const int row = group.rank().value / 3;
    const int column = group.rank().value % 3;
    const auto rows = subset(group, ranks({3 * row, 3 * row + 1, 3 * row + 2}));
    const auto columns = subset(group, ranks({column, column + 3}));
    DYNMO_ASSIGN(const auto across, names(group, *rows));
    DYNMO_ASSIGN(const auto down, names(group, *columns));
    EXPECT_EQ(across, std::vector({3 * row, 3 * row + 1, 3 * row + 2}));
    EXPECT_EQ(down, std::vector({column, column + 3}));
    return {};
  });
  EXPECT_TRUE(done.has_value()) << done.error().message;
}

TEST(Subset, AnErrorEndsTheWholeGroup) {
  std::mutex mutex;
  int ended = 0;
  const auto done = run_ranks(4, [&](Transport& group) -> Expected<void> {
    const auto part = subset(group, group.rank().value < 2 ? ranks({0, 1}) : ranks({2, 3}));
    if (group.rank() == Member(0)) part->abort(make_error(ErrorCode::kPeerLost, "gone"));
    std::byte byte{};
    const auto received =
        part->receive(Member(1 - part->rank().value), 1, std::span(&byte, 1))->wait();
    EXPECT_FALSE(received.has_value());
    if (received.has_value()) return {};
    const std::lock_guard lock(mutex);
    ended += received.error().message == "gone" ? 1 : 0;
    return received;
  });
  EXPECT_FALSE(done.has_value());
  EXPECT_EQ(ended, 4);
}

TEST(Subset, WantsDifferentRanksOfTheGroupAndItsOwn) {
  auto group = make_in_process_group(3);
  EXPECT_THROW(static_cast<void>(subset(*group[0], ranks({1, 2}))), CheckFailure);
  EXPECT_THROW(static_cast<void>(subset(*group[0], ranks({0, 0}))), CheckFailure);
  EXPECT_THROW(static_cast<void>(subset(*group[0], ranks({0, 3}))), CheckFailure);
  const auto part = subset(*group[0], ranks({2, 0}));
  std::byte byte{};
  EXPECT_THROW(static_cast<void>(part->send(Member(2), 1, std::span(&byte, 1))), CheckFailure);
}

}  // namespace
}  // namespace dynmo::transport
