// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/survivors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace dynmo::elastic {
namespace {

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

Loss loss_of(const View& before, int replicas = 1) {
  return {.before = before, .generation = 9, .replicas = replicas, .why = {}};
}

const Place kMeetingPlace{
    .generation = 10, .size = 2, .address = "10.0.0.1", .port = 7, .secret = 5};

int index_of(const Member& member) { return member.number; }

// Two containers of one host may have its name, and process ids of their own.
TEST(Survivors, AskAMemberOfTheSameHostNameWhoseProcessesTheyDoNotSee) {
  View before = view_of(3);
  for (Member& member : before.members) member.host = "ubuntu";
  for (Member& member : before.members) member.processes = "boot pid:[1]";
  before.members[1].processes = "boot pid:[2]";
  const auto at = Survivors::Clock::time_point() + std::chrono::hours(1);
  std::vector<int> asked;
  Standing standing;
  Survivors caller(
      loss_of(before), before.members[0],
      [&](const Member& member) -> Answer {
        asked.push_back(member.number);
        return {.fate = Fate::kAlive};
      },
      standing, std::chrono::hours(2));
  caller.look(at);  // (pid 0 is no process)
  EXPECT_EQ(asked, std::vector{1});
  const auto call = caller.call();
  ASSERT_TRUE(call);
  EXPECT_EQ(call->next.size(), 2);
  EXPECT_TRUE(call->next.has(MemberId{2})) << "it has answered";
  EXPECT_FALSE(call->next.has(MemberId{3})) << "its process is gone";
  EXPECT_FALSE(caller.misses(call->next));
}

// A newcomer that has not learned that its group is in force leaves it, and its process lives.
TEST(Survivors, GoOnWithoutAMemberThatHasLeftAndWhoseProcessLives) {
  View before = view_of(3);
  for (Member& member : before.members) member.host = "ubuntu";
  for (Member& member : before.members) member.pid = ::getpid();
  for (const std::size_t left : {0U, 2U}) {
    Standing standing;
    Survivors caller(
        loss_of(before), before.members[left == 0 ? 1 : 0],
        [&](const Member& member) -> Answer {
          return {.fate = member == before.members[left] ? Fate::kDead : Fate::kSilent};
        },
        standing);
    caller.look(Survivors::Clock::now());
    auto call = caller.call();
    ASSERT_TRUE(call);
    caller.look(Survivors::Clock::now());  // while they meet
    EXPECT_EQ(caller.misses(call->next).has_value(), left == 2) << "called before it was asked";
    call = caller.call();
    ASSERT_TRUE(call);
    View others = before;
    others.members.erase(others.members.begin() + static_cast<std::ptrdiff_t>(left));
    EXPECT_EQ(call->next.members, others.members);
  }
}

// All truths of four ranks, and all ways in which some of them cannot reach others.
TEST(Survivors, AtMostOneCallsAndNobodyIsLeftOutThatLivesButByMoreThanHalf) {
  constexpr int kRanks = 4;
  const View before = view_of(kRanks);
  const auto at = Survivors::Clock::time_point() + std::chrono::hours(1);
  for (const bool patient : {true, false}) {
    const auto patience = patient ? std::chrono::hours(2) : std::chrono::hours(0);
    for (unsigned alive = 1; alive < 1U << kRanks; ++alive) {
      for (unsigned cut = 0; cut < 1U << (kRanks * (kRanks - 1)); cut += alive == 15U ? 1 : 7) {
        std::vector<unsigned> calls;
        for (int self = 0; self < kRanks; ++self) {
          if ((alive >> self & 1U) == 0) continue;
          Standing standing;
          Survivors caller(
              loss_of(before), before.members[static_cast<std::size_t>(self)],
              [&](const Member& member) -> Answer {
                const int other = index_of(member);
                const int way = self * (kRanks - 1) + other - (other > self);
                if ((cut >> way & 1U) != 0) return {};
                return {.fate = (alive >> other & 1U) != 0 ? Fate::kAlive : Fate::kDead};
              },
              standing, patience);
          caller.look(at);
          const auto call = caller.call();
          if (!call || call->next.members.empty()) continue;
          unsigned called = 0;
          for (const Member& member : call->next.members) called |= 1U << index_of(member);
          ASSERT_EQ(called & alive, called) << "cut " << cut << ", caller " << self;
          ASSERT_TRUE(called == alive ||
                      (!patient && 2 * std::popcount(called) > std::popcount(alive)))
              << "cut " << cut << ", caller " << self;
          ASSERT_EQ(call->next.generation, 10);
          for (const unsigned other : calls) ASSERT_NE(other & called, 0U) << "cut " << cut;
          calls.push_back(called);
        }
        ASSERT_LE(calls.size(), patient ? 1U : 2U) << "alive " << alive << ", cut " << cut;
        if (cut == 0) {
          ASSERT_EQ(calls.size(), 1U) << "alive " << alive;
        }
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
  Standing standing;
  Survivors survivors(
      loss_of(before), before.members[2],
      [&](const Member& member) {
        return member.number == 0 ? answer : Answer{.fate = Fate::kDead};
      },
      standing);
  const auto heard = [&] {
    survivors.look(Survivors::Clock::now());
    return survivors.heard();
  };
  for (const std::string& wrong :
       {std::string(), std::string("{"), std::string("[]"), std::string(R"({"view": 1})"),
        std::string(R"({"view": 1, "place": 2, "spares": 3, "dead": "x"})"),
        text_of({.next = before, .place = kMeetingPlace})}) {  // the last: of an earlier loss
    answer.notice = wrong;
    EXPECT_FALSE(heard()) << wrong;
    EXPECT_FALSE(survivors.call());
  }
  answer.notice = text_of({.next = next, .place = kMeetingPlace});
  const auto call = heard();
  ASSERT_TRUE(call);
  EXPECT_EQ(call->next, next);
  EXPECT_EQ(call->place.address, kMeetingPlace.address);
  EXPECT_FALSE(heard()) << "heard before";
}

// Two of four are cut off, and do not answer at the same time when the way is open again.
TEST(Survivors, WaitForTheOthersOnceOneOfThoseThatWereSilentAnswers) {
  const View before = view_of(4);
  std::vector<Fate> fates = {Fate::kAlive, Fate::kAlive, Fate::kSilent, Fate::kSilent};
  for (const bool both : {true, false}) {
    Standing standing;
    Survivors survivors(
        loss_of(before), before.members[0],
        [&](const Member& member) {
          return Answer{.fate = fates[static_cast<std::size_t>(member.number)]};
        },
        standing, std::chrono::seconds(3));
    auto at = Survivors::Clock::time_point() + std::chrono::hours(1);
    const auto call_after = [&](int seconds) {
      survivors.look(at += std::chrono::seconds(seconds));
      return survivors.call();
    };
    fates[2] = fates[3] = Fate::kSilent;
    EXPECT_FALSE(call_after(0));
    EXPECT_FALSE(call_after(10));  // half is not enough
    fates[3] = Fate::kAlive;
    EXPECT_FALSE(call_after(1));
    EXPECT_FALSE(call_after(2));
    if (both) fates[2] = Fate::kAlive;
    const auto call = call_after(1);
    ASSERT_TRUE(call);
    EXPECT_EQ(call->next.size(), both ? 4 : 3);
  }
}

TEST(Survivors, WhoIsSpareLeavesAndWhoIsLeftOutKnowsIt) {
  const View before = view_of(3);
  for (const int of : {0, 2}) {  // who tells of it, below and above
    const std::size_t self = of == 0 ? 2 : 0;
    MeetingCall call{.next = before, .place = kMeetingPlace};
    call.next.generation = 10;
    call.next.members.erase(call.next.members.begin() + static_cast<std::ptrdiff_t>(self));
    for (const bool spare : {true, false}) {
      call.spares.clear();
      if (spare) call.spares.push_back(before.members[self].id);
      Standing standing;
      Survivors survivors(
          loss_of(before), before.members[self],
          [&](const Member& member) -> Answer {
            return {.fate = Fate::kAlive, .notice = member.number == of ? text_of(call) : ""};
          },
          standing);
      survivors.look(Survivors::Clock::now());
      const auto heard = survivors.heard();
      ASSERT_TRUE(heard);
      EXPECT_FALSE(heard->next.has(before.members[self].id));
      EXPECT_EQ(heard->spares_member(before.members[self].id), spare);
    }
  }
}

// Two of four are not more than half, but two of three are: the one that is spare leaves first.
TEST(Survivors, SparesLeaveWhereTheOthersAreTooFewBesideThem) {
  const View before = view_of(4);  // two replicas of two positions
  std::vector<int> ended;
  std::string said;
  const auto survivor = [&](std::size_t rank, Standing& standing) {
    return Survivors(
        loss_of(before, 2), before.members[rank],
        [&](const Member& member) -> Answer {
          if (std::ranges::count(ended, member.number) > 0) return {.fate = Fate::kDead};
          if (member.number == 1) return {};
          return {.fate = Fate::kAlive, .notice = member.number == 0 ? said : ""};
        },
        standing, std::chrono::seconds(0));
  };
  Standing standing;
  Survivors caller = survivor(0, standing);
  caller.look(Survivors::Clock::now());
  auto call = caller.call();
  ASSERT_TRUE(call);
  EXPECT_TRUE(call->waits);
  EXPECT_EQ(call->spares, std::vector{before.members[2].id});
  said = text_of(*call);
  for (const std::size_t rank : {1U, 2U, 3U}) {  // the second one cannot be heard, but hears
    Standing own;
    Survivors hearer = survivor(rank, own);
    hearer.look(Survivors::Clock::now());
    const auto heard = hearer.heard();
    ASSERT_EQ(heard.has_value(), rank == 2) << rank;
    EXPECT_TRUE(!heard || heard->spares_member(before.members[rank].id));
  }
  caller.look(Survivors::Clock::now());
  EXPECT_TRUE(caller.call()->waits);
  ended.push_back(2);
  caller.look(Survivors::Clock::now());
  call = caller.call();
  ASSERT_TRUE(call);
  EXPECT_FALSE(call->waits);
  EXPECT_EQ(call->next.members, (std::vector{before.members[0], before.members[3]}));
  EXPECT_EQ(call->spares, std::vector{before.members[2].id});  // it was not lost
  call->place = kMeetingPlace;
  said = text_of(*call);
  Standing own;
  Survivors hearer = survivor(3, own);
  hearer.look(Survivors::Clock::now());
  ASSERT_TRUE(hearer.heard());
}

// A call that its hearer may not follow as yet is heard again.
TEST(Survivors, WaitForTheQuorumOfAViewThatCounts) {
  const View before = view_of(4);
  const auto with = [&](const std::vector<std::size_t>& ranks, Generation generation) {
    View view{.generation = generation};
    for (const std::size_t rank : ranks) view.members.push_back(before.members[rank]);
    return view;
  };
  Standing standing{.open = {with({1, 2, 3}, 10)}};
  std::vector<int> ended;
  Survivors survivors(
      loss_of(before), before.members[3],
      [&](const Member& member) -> Answer {
        if (std::ranges::count(ended, member.number) > 0) return {.fate = Fate::kDead};
        if (member.number != 0) return {};
        return {.fate = Fate::kAlive,
                .notice = text_of({.next = with({0, 3}, 11), .place = kMeetingPlace})};
      },
      standing, std::chrono::seconds(0));
  for (const int rank : {1, 2}) {
    survivors.look(Survivors::Clock::now());
    EXPECT_FALSE(survivors.heard());
    ended.push_back(rank);
  }
  survivors.look(Survivors::Clock::now());
  EXPECT_TRUE(survivors.heard());
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
}  // namespace dynmo::elastic
