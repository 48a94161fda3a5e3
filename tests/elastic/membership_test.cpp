// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/membership.h"

#include <gtest/gtest.h>

#include <deque>
#include <map>

namespace dynmo::elastic {
namespace {

View view_of(int members) {
  View view{.generation = 1};
  for (int i = 0; i < members; ++i) {
    view.members.push_back({.id = {static_cast<std::uint64_t>(i) + 1}, .number = i});
  }
  return view;
}

std::vector<MemberId> ids(std::initializer_list<std::uint64_t> values) {
  std::vector<MemberId> all;
  for (const std::uint64_t value : values) all.push_back({value});
  return all;
}

// Members with a network that loses nothing; who is dead hears and says nothing.
class Members {
 public:
  explicit Members(int count, const Settings& settings = {.model = {.layers = 1}}) {
    for (const Member& member : view_of(count).members) {
      all_[member.id.value] = first_member(settings, view_of(count), member.id);
    }
  }
  Membership& operator[](std::uint64_t id) { return all_.at(id); }
  void add(const Membership& member) { all_[member.self.id.value] = member; }
  void kill(std::uint64_t id, const std::vector<std::uint64_t>& told) {
    dead_.push_back({id});
    for (const std::uint64_t other : told) tell(other, FateTold{{id}, Fate::kDead});
  }
  void tell(std::uint64_t id, const Event& event) {
    for (const Action& action : handle(all_.at(id), event)) act(id, action);
  }
  void tell_each(const std::vector<std::uint64_t>& ids, const Event& event) {
    for (const std::uint64_t id : ids) tell(id, event);
  }
  // Until nothing happens any more; groups form at once.
  void settle() {
    while (!events_.empty()) {
      const auto [id, event] = events_.front();
      events_.pop_front();
      if (std::find(dead_.begin(), dead_.end(), MemberId{id}) == dead_.end()) tell(id, event);
    }
  }
  std::map<std::uint64_t, Ended> ended;

 private:
  void act(std::uint64_t id, const Action& action) {
    if (const auto* sent = std::get_if<Send>(&action)) {
      events_.emplace_back(sent->to.value, Received{{id}, sent->message});
    } else if (std::holds_alternative<Quiet>(action)) {
      Report report{.member = all_.at(id).self};
      report.holdings = {{.layer = LayerId(0)}};
      events_.emplace_back(id, Quieted{report});
    } else if (std::holds_alternative<FormGroup>(action)) {
      events_.emplace_back(id, Formed{});
    } else if (const auto* end = std::get_if<Ended>(&action)) {
      ended[id] = *end;
    }
  }
  std::map<std::uint64_t, Membership> all_;
  std::vector<MemberId> dead_;
  std::deque<std::pair<std::uint64_t, Event>> events_;
};

TEST(Quorum, IsMoreThanHalfOfThoseNotGoneOrHalfWithTheLowest) {
  const View four = view_of(4);
  EXPECT_TRUE(has_quorum(four, ids({2, 3, 4}), {}));
  EXPECT_TRUE(has_quorum(four, ids({1, 4}), {}));
  EXPECT_FALSE(has_quorum(four, ids({2, 3}), {}));
  EXPECT_TRUE(has_quorum(four, ids({2, 3}), ids({1})));
  EXPECT_TRUE(has_quorum(four, ids({4}), ids({1, 2, 3})));
  EXPECT_FALSE(has_quorum(four, ids({4}), ids({1, 2})));
  EXPECT_FALSE(has_quorum(four, ids({9}), ids({1, 2, 3, 4})));
}

TEST(Membership, SurvivesKilledMembersDownToTheLast) {
  Members members(3);
  members.kill(2, {1});
  members.settle();
  EXPECT_EQ(members[1].phase, Phase::kRun);
  EXPECT_EQ(members[1].standing.installed.size(), 2);
  EXPECT_EQ(members[3].standing.installed, members[1].standing.installed);
  members.kill(1, {3});
  members.settle();
  EXPECT_EQ(members[3].phase, Phase::kRun);
  EXPECT_EQ(members[3].standing.installed.size(), 1);
  EXPECT_EQ(members[3].standing.installed.generation, 3);
}

TEST(Membership, OfTwoThatLoseEachOtherTheLeaderGoesOn) {
  Members members(2);
  members.tell(1, FateTold{{2}, Fate::kSilent});
  members.tell(2, FateTold{{1}, Fate::kSilent});
  members.kill(0, {});  // what they say is lost
  Members one = members;
  one.kill(2, {});
  one.settle();
  EXPECT_EQ(one[1].phase, Phase::kRun);
  EXPECT_EQ(one[1].standing.installed.size(), 1);
  EXPECT_EQ(one[1].standing.earlier.size(), 1U);  // the other may be alive
  Members two = members;
  two.kill(1, {});
  two.settle();
  ASSERT_TRUE(two.ended.contains(2));
  EXPECT_EQ(two.ended[2].code, 5);
}

TEST(Membership, APlannedChangeIsInForceOnceItIsTaken) {
  Members members(3);
  const Member joins{.id = {9}, .number = 3};
  const View next{.generation = 2, .members = {members[1].self, members[2].self, joins}};
  members.add(newcomer({.model = {.layers = 1}}, next, {9}, views_that_count(members[1])));
  members.tell_each({1, 2, 3}, Tries{next});
  EXPECT_EQ(members[3].standing.attempts, std::vector<View>{next});
  members.tell_each({1, 2, 3, 9}, Taken{});
  EXPECT_EQ(members.ended.at(3).code, 0);
  EXPECT_EQ(members[9].standing.installed, next);
  EXPECT_EQ(members[1].standing.installed, next);
  const View alone{.generation = 3, .members = {joins}};
  EXPECT_FALSE(
      may_try(members[1], alone));  // the third may be alive, and would be all that is left
  members.kill(3, {1});
  EXPECT_TRUE(may_try(members[1], alone));
}

TEST(Membership, AChangeThatWasRefusedIsForgotten) {
  Members members(3);
  const View next{.generation = 2, .members = {members[1].self}};
  members.tell_each({1, 2, 3}, Tries{next});
  members.tell_each({1, 2, 3}, Kept{});
  EXPECT_EQ(members[2].standing, first_member({}, view_of(3), {2}).standing);
  members.kill(1, {2, 3});
  members.settle();
  EXPECT_EQ(members[2].standing.installed.size(), 2);
  EXPECT_EQ(members[2].standing.installed.generation, 3);  // 2 was tried
}

// The member that was to leave has not heard that all agreed; the one that stayed alone is killed.
TEST(Membership, WhoWasToLeaveGoesOnWhenAllWhoStayedAreGone) {
  Members members(2);
  const View next{.generation = 2, .members = {members[1].self}};
  members.tell_each({1, 2}, Tries{next});
  members.tell(1, Taken{});
  members.kill(1, {2});
  members.settle();
  EXPECT_TRUE(members.ended.empty());
  EXPECT_EQ(members[2].phase, Phase::kRun);
  EXPECT_EQ(members[2].standing.installed.size(), 1);
}

TEST(Membership, ANewcomerOfAChangeThatOthersDoNotKnowEndsWithTheCodeOfALoss) {
  Members members(2);
  const Member joins{.id = {9}, .number = 2};
  const View next{.generation = 2, .members = {members[1].self, members[2].self, joins}};
  members.add(newcomer({.model = {.layers = 1}}, next, {9}, views_that_count(members[1])));
  members.tell(9, GroupFailed{2});
  members.settle();
  EXPECT_EQ(members.ended.at(9).code, 5);
  EXPECT_EQ(members[1].phase, Phase::kRun);
}

TEST(Membership, RefusesAnOlderBallotThanItHasPromised) {
  Membership second = first_member({.model = {.layers = 1}}, view_of(3), {2});
  const Ballot older{.number = 2, .proposer = {1}};
  (void)handle(second, Received{{1}, Prepare{older}});
  (void)handle(second, Quieted{{.member = second.self}});
  (void)handle(second, Received{{1}, Prepare{{.number = 3, .proposer = {1}}}});
  (void)handle(second, Quieted{{.member = second.self}});
  const auto actions =
      handle(second, Received{{1}, Form{.ballot = older, .view = {2, view_of(3).members}}});
  ASSERT_EQ(actions.size(), 1U);
  const auto& said = std::get<Send>(actions.front()).message;
  EXPECT_EQ(std::get<Refuse>(said), (Refuse{older, 3}));
  EXPECT_EQ(second.phase, Phase::kReported);
  EXPECT_TRUE(second.standing.attempts.empty());
}

TEST(Membership, EndsAtTheThirdLossInTheSameStep) {
  Members members(4);
  members.kill(4, {1});
  members.settle();
  members.kill(3, {1});
  members.settle();
  EXPECT_EQ(members[1].phase, Phase::kRun);
  members.kill(2, {1});
  members.settle();
  ASSERT_TRUE(members.ended.contains(1));
  EXPECT_EQ(members.ended[1].code, 5);
  EXPECT_NE(members.ended[1].reason.find("step 0"), std::string::npos);
}

TEST(Membership, EndsBelowTheMinimalNumberOfRanks) {
  Members members(2, {.model = {.layers = 1}, .ranks_min = 2});
  members.kill(2, {1});
  members.settle();
  ASSERT_TRUE(members.ended.contains(1));
  EXPECT_EQ(members.ended[1].code, 3);
}

TEST(Membership, NumbersOfPlansAreNotUsedAgain) {
  Members members(2);
  members.tell(1, NumberTaken{40});
  members.kill(2, {1});
  members.settle();
  EXPECT_EQ(members[1].standing.installed.generation, 41);
}

}  // namespace
}  // namespace dynmo::elastic
