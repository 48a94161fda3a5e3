// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/survivors.h"

#include <gtest/gtest.h>

#include <bit>
#include <optional>
#include <string>
#include <vector>

namespace dynmo::train {
namespace {

using elastic::Answer;
using elastic::Fate;
using elastic::Member;
using elastic::MemberId;
using elastic::View;

// Each on a host of its own.
View view_of(int size) {
  View view;
  view.generation = 4;
  for (int i = 0; i < size; ++i) {
    view.members.push_back({.id = MemberId{static_cast<std::uint64_t>(i) + 1},
                            .number = i,
                            .host = "host-" + std::to_string(i)});
  }
  return view;
}

elastic::Loss loss_of(const View& before, int replicas = 1) {
  return {.before = before, .generation = 9, .replicas = replicas, .why = {}};
}

int index_of(const Member& member) { return member.number; }

// All truths of four ranks, and all ways in which some of them cannot reach others.
TEST(Survivors, AtMostOneCallsAndLeavesNobodyOutThatLives) {
  constexpr int kRanks = 4;
  const View before = view_of(kRanks);
  for (unsigned alive = 1; alive < 1U << kRanks; ++alive) {
    for (unsigned cut = 0; cut < 1U << (kRanks * (kRanks - 1)); cut += alive == 15U ? 1 : 7) {
      int callers = 0;
      for (int self = 0; self < kRanks; ++self) {
        if ((alive >> self & 1U) == 0) continue;
        const Survivors survivors(
            loss_of(before), before.members[static_cast<std::size_t>(self)],
            [&](const Member& member) -> Answer {
              const int other = index_of(member);
              const int way = self * (kRanks - 1) + other - (other > self);
              if ((cut >> way & 1U) != 0) return {};
              return {.fate = (alive >> other & 1U) != 0 ? Fate::kAlive : Fate::kDead};
            });
        Survivors caller = survivors;
        const std::optional<View> next = caller.calls() ? caller.next() : std::nullopt;
        if (!next) continue;
        ++callers;
        unsigned called = 0;
        for (const Member& member : next->members) called |= 1U << index_of(member);
        ASSERT_EQ(called, alive) << "cut " << cut << ", caller " << self;
        ASSERT_EQ(next->generation, 10);
      }
      ASSERT_LE(callers, 1) << "alive " << alive << ", cut " << cut;
      if (cut == 0) {
        ASSERT_EQ(callers, 1) << "alive " << alive;
      }
    }
  }
}

TEST(Survivors, HearEachCallOnce) {
  const View before = view_of(3);
  View next = before;
  next.members.erase(next.members.begin() + 1);
  next.generation = 10;
  Answer answer{.fate = Fate::kAlive};
  Survivors survivors(loss_of(before), before.members[2], [&](const Member& member) {
    return member.number == 0 ? answer : Answer{.fate = Fate::kDead};
  });
  EXPECT_FALSE(survivors.calls());
  const elastic::Place place{
      .generation = 10, .size = 2, .address = "10.0.0.1", .port = 7, .secret = 5};
  for (const std::string& wrong :
       {std::string(), std::string("{"), std::string("[]"), std::string(R"({"view": 1})"),
        text_of({.next = before, .place = place})}) {  // the last: of an earlier loss
    answer.notice = wrong;
    EXPECT_FALSE(survivors.heard()) << wrong;
  }
  answer.notice = text_of({.next = next, .place = place});
  const auto heard = survivors.heard();
  ASSERT_TRUE(heard);
  EXPECT_EQ(heard->next, next);
  EXPECT_EQ(heard->place.address, place.address);
  EXPECT_FALSE(survivors.heard()) << "heard before";
}

TEST(Survivors, OneOfEachPositionGoesOn) {
  const View before = view_of(6);  // positions 0 1 2, twice
  for (unsigned alive = 1; alive < 1U << 6; ++alive) {
    View living;
    for (int i = 0; i < 6; ++i) {
      if ((alive >> i & 1U) != 0)
        living.members.push_back(before.members[static_cast<std::size_t>(i)]);
    }
    const View next = as_many_as_divide(living, before, 2);
    EXPECT_EQ(next.size(), std::popcount(alive) / 2 * 2);
    const auto positions = [](const View& view) {
      unsigned all = 0;
      for (const Member& member : view.members) all |= 1U << (index_of(member) % 3);
      return all;
    };
    // With one more than pairs, a position that two hold gives one away.
    if (std::popcount(alive) > std::popcount(positions(living))) {
      EXPECT_EQ(positions(next), positions(living)) << alive;
    }
  }
}

}  // namespace
}  // namespace dynmo::train
