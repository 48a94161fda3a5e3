// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/size_changes.h"

#include <gtest/gtest.h>

#include <numeric>

namespace dynmo::train {
namespace {

using elastic::RequestKind;

// A run of `replicas` x as many ranks as the cut has parts; the number of a member is 10 more than
// its place, so that neither is taken for the other.
struct Boundary {
  explicit Boundary(std::vector<int> cut, int replicas = 1, std::function<void(Config&)> set = {})
      : plan(plan::make_plan(cut, schedule::ScheduleKind::k1F1B)) {
    Config config;
    config.pipeline.replicas = replicas;
    if (set) set(config);
    changes.emplace(config);
    for (int i = 0; i < replicas * plan.ranks; ++i) {
      view.members.push_back({.id = {static_cast<std::uint64_t>(i) + 1}, .number = 10 + i});
    }
    silent.resize(view.members.size());
  }
  Turn next(const std::vector<RankWord>& words) {
    return changes->next(words, view, plan, step++, /*costs_known=*/true);
  }
  Turn next() { return next({}); }
  Turn wish(const Wish& wish) { return wishes({wish}); }
  Turn wishes(std::vector<Wish> all) {
    std::vector<RankWord> words = silent;
    words.front().wishes = std::move(all);
    return next(words);
  }
  Turn leave(const std::vector<int>& places) {
    std::vector<RankWord> words = silent;
    for (const int place : places) words[static_cast<std::size_t>(place)].leave = true;
    return next(words);
  }
  Turn joiners(int count, int first_client = 1) {
    std::vector<RankWord> words = silent;
    for (int i = 0; i < count; ++i) {
      const auto client = static_cast<process::ClientId>(first_client + i);
      words.front().joiners.push_back({.client = client, .member = {.id = {100 + client}}});
    }
    return next(words);
  }

  plan::Plan plan;
  std::optional<SizeChanges> changes;
  elastic::View view;
  std::vector<RankWord> silent;
  std::int64_t step = 0;
};

std::vector<int> kept_of(const Turn& turn) {
  std::vector<int> kept;
  if (!turn.change) return kept;
  for (const Rank rank : turn.change->kept) kept.push_back(rank.value);
  return kept;
}

void expect_refusal(const Turn& turn, process::ClientId client, std::string_view names) {
  EXPECT_FALSE(turn.change);
  ASSERT_EQ(turn.answers.size(), 1U);
  EXPECT_EQ(turn.answers.front().client, client);
  EXPECT_FALSE(turn.answers.front().reply.done);
  EXPECT_EQ(turn.answers.front().reply.code, ErrorCode::kBadInput);
  EXPECT_NE(turn.answers.front().reply.text.find(names), std::string::npos)
      << turn.answers.front().reply.text;
}

void expect_nothing(const Turn& turn) {
  EXPECT_FALSE(turn.change || turn.checkpoint || turn.stop);
  EXPECT_TRUE(turn.answers.empty() && turn.wait_for_checkpoint.empty() &&
              turn.wait_for_stop.empty());
}

Wish pack(int ranks, process::ClientId client = 5) {
  return {.kind = RequestKind::kPack, .client = client, .ranks = ranks};
}
Wish drain(int member, process::ClientId client = 5) {
  return {.kind = RequestKind::kDrain, .client = client, .member = member};
}

TEST(SizeChanges, WhereNobodySaysAnythingNothingHappens) {
  Boundary at({2, 2, 2});
  expect_nothing(at.next());
  expect_nothing(at.next(at.silent));
  // These requests are answered without the training loop.
  for (const RequestKind kind : {RequestKind::kStatus, RequestKind::kConfig, RequestKind::kJoin}) {
    expect_nothing(at.wish({.kind = kind, .client = 1}));
  }
}

TEST(SizeChanges, PackKeepsTheLowestPositions) {
  Boundary at({2, 2, 2, 2});
  const Turn turn = at.wish(pack(2));
  EXPECT_EQ(kept_of(turn), (std::vector{0, 1}));
  EXPECT_EQ(turn.change->client, 5U);
  EXPECT_EQ(turn.change->why, "packed onto 2 ranks");
  EXPECT_TRUE(turn.answers.empty()) << "the client hears when it is done";
}

TEST(SizeChanges, PackOntoMoreRanksThanItHasOrTooFewIsRefused) {
  const auto two_at_least = [](Config& config) { config.elastic.ranks_min = 2; };
  Boundary at({2, 2, 2}, 1, two_at_least);
  const Turn already = at.wish(pack(3));
  EXPECT_FALSE(already.change);
  ASSERT_EQ(already.answers.size(), 1U);
  EXPECT_TRUE(already.answers.front().reply.done);
  EXPECT_EQ(already.answers.front().reply.text, "the run is on 3 ranks already");
  expect_refusal(at.wish(pack(4)), 5, "wanted at most 3: the run is on 3 ranks already");
  expect_refusal(at.wish(pack(9)), 5, "ctl RUN grow");
  expect_refusal(at.wish(pack(1)), 5, "ranks_min = 2");
  EXPECT_EQ(kept_of(at.wish(pack(2))), (std::vector{0, 1}));
}

TEST(SizeChanges, OneChangeAtATime) {
  Boundary at({2, 2, 2, 2});
  const Turn turn = at.wishes({pack(3, 5), pack(2, 6), drain(11, 7)});
  EXPECT_EQ(kept_of(turn), (std::vector{0, 1, 2}));
  EXPECT_EQ(turn.change->client, 5U);
  ASSERT_EQ(turn.answers.size(), 2U);
  EXPECT_EQ(turn.answers[0].client, 6U);
  EXPECT_EQ(turn.answers[1].client, 7U);
  for (const Turn::Answer& answer : turn.answers) {
    EXPECT_NE(answer.reply.text.find("another change is under way"), std::string::npos);
  }
}

TEST(SizeChanges, ADrainedMemberLeavesWithItsPositionInAllReplicas) {
  for (const int member : {12, 15}) {  // position 2 of either replica
    Boundary at({2, 2, 2}, 2);
    const Turn turn = at.wish(drain(member));
    EXPECT_EQ(kept_of(turn), (std::vector{0, 1}));
    EXPECT_EQ(turn.change->why, fmt::format("rank {} was drained", member));
    EXPECT_EQ(turn.change->client, 5U);
  }
}

TEST(SizeChanges, WhoLeadsCanBeDrained) {
  for (const int member : {10, 13}) {  // position 0 of either replica
    Boundary at({2, 2, 2}, 2);
    EXPECT_EQ(kept_of(at.wish(drain(member))), (std::vector{1, 2}));
  }
}

TEST(SizeChanges, WhoIsNobodyAndTheLastOneCannotBeDrained) {
  Boundary at({2, 2, 2}, 2, [](Config& config) { config.elastic.ranks_min = 3; });
  expect_refusal(at.wish(drain(2)), 5, "wanted one of 10, 11, 12, 13, 14, 15");
  expect_refusal(at.wish(drain(11)), 5, "ranks_min is 3");
}

TEST(SizeChanges, ADrainJoinsWhatIsUnderWay) {
  Boundary at({1, 1, 1, 1, 1});
  const Turn two = at.leave({2, 4});
  EXPECT_EQ(kept_of(two), (std::vector{0, 1, 3}));
  EXPECT_EQ(two.change->why, "rank 12 was drained, rank 14 was drained");
  EXPECT_EQ(two.change->client, 0U);

  // A client's change and a signal in one turn: the client hears of both.
  Boundary more({1, 1, 1, 1, 1});
  std::vector<RankWord> words = more.silent;
  words.front().wishes = {drain(13, 5)};
  words[1].leave = true;
  const Turn turn = more.next(words);
  EXPECT_EQ(kept_of(turn), (std::vector{0, 2, 4}));
  EXPECT_EQ(turn.change->client, 5U);
}

TEST(SizeChanges, WhoAskedToLeaveIsNotDrainedTwice) {
  Boundary at({1, 1, 1, 1});
  at.changes->defer(*at.leave({2}).change);
  for (int i = 0; i < 20; ++i) {  // the signal stays
    Turn turn = at.leave({2});
    ASSERT_TRUE(turn.change);
    EXPECT_EQ(turn.change->why, "rank 12 was drained");
    EXPECT_TRUE(turn.answers.empty());
    at.changes->defer(*std::move(turn.change));
  }
  std::vector<RankWord> words = at.silent;
  words.front().wishes = {drain(12)};
  const Turn turn = at.next(words);
  ASSERT_EQ(turn.answers.size(), 1U);
  EXPECT_NE(turn.answers.front().reply.text.find("leaves already"), std::string::npos);
}

TEST(SizeChanges, WhoCannotLeaveIsToldSoNowAndThen) {
  Boundary at({1, 1}, 1, [](Config& config) {
    config.elastic.ranks_min = 2;
    config.elastic.release_after = 4;
  });
  int told = 0;
  for (int i = 0; i < 12; ++i) {
    const Turn turn = at.leave({1});
    EXPECT_FALSE(turn.change);
    told += static_cast<int>(turn.answers.size());
  }
  EXPECT_EQ(told, 3);
}

TEST(SizeChanges, TheRunStopsWhenAllAreAskedToLeave) {
  Boundary at({1, 1, 1});
  const Turn some = at.leave({0, 2});
  EXPECT_FALSE(some.stop);
  EXPECT_EQ(kept_of(some), (std::vector{1}));
  const Turn all = at.leave({0, 1, 2});
  EXPECT_EQ(all.stop, "all ranks were asked to leave");
}

TEST(SizeChanges, WhoAsksWhileAllAreAskedToLeaveHearsOfTheEnd) {
  Boundary at({1, 1});
  std::vector<RankWord> words = at.silent;
  for (RankWord& word : words) word.leave = true;
  words.front().wishes = {{.kind = RequestKind::kStop, .client = 3},
                          {.kind = RequestKind::kCheckpoint, .client = 4}};
  const Turn turn = at.next(words);
  EXPECT_TRUE(turn.stop);
  EXPECT_EQ(turn.wait_for_stop, (std::vector<process::ClientId>{3}));
  EXPECT_EQ(turn.wait_for_checkpoint, (std::vector<process::ClientId>{4}));
}

TEST(SizeChanges, StopAndCheckpointAreTheClientsToHearOf) {
  Boundary at({1, 1});
  const Turn turn = at.wishes({{.kind = RequestKind::kCheckpoint, .client = 3},
                               {.kind = RequestKind::kCheckpoint, .client = 4},
                               {.kind = RequestKind::kStop, .client = 5}});
  EXPECT_TRUE(turn.checkpoint);
  EXPECT_EQ(turn.stop, "dynmo ctl stop");
  EXPECT_EQ(turn.wait_for_checkpoint, (std::vector<process::ClientId>{3, 4}));
  EXPECT_EQ(turn.wait_for_stop, (std::vector<process::ClientId>{5}));
  EXPECT_TRUE(turn.answers.empty());
}

TEST(SizeChanges, JoinersWaitForWhoLeaves) {
  Boundary at({1, 1, 1});
  std::vector<RankWord> words = at.silent;
  words.front().joiners = {{.client = 1, .member = {.id = {101}}}};
  words[2].leave = true;
  const Turn first = at.next(words);
  EXPECT_EQ(kept_of(first), (std::vector{0, 1}));
  EXPECT_TRUE(first.change->joiners.empty());
  const Turn second = at.joiners(2);
  EXPECT_EQ(kept_of(second), (std::vector{0, 1, 2}));
  EXPECT_EQ(second.change->joiners.size(), 2U);
  EXPECT_EQ(second.change->why, "ranks have joined");
  EXPECT_EQ(at.joiners(1).change->why, "a rank has joined");
}

TEST(SizeChanges, AChangeThatHasToWaitComesAgain) {
  Boundary at({1, 1, 1, 1});
  SizeChange change = *at.wish(pack(2)).change;
  for (int waited = 1; waited < 4; ++waited) {
    at.changes->defer(std::move(change));
    Turn turn = at.next();
    EXPECT_EQ(kept_of(turn), (std::vector{0, 1}));
    ASSERT_TRUE(turn.change);
    EXPECT_EQ(turn.change->waited, waited);
    EXPECT_EQ(turn.change->client, 5U);
    change = *std::move(turn.change);
  }
  expect_nothing(at.next());  // unless it is deferred again
  // Meanwhile nobody else's begins.
  at.changes->defer(std::move(change));
  const Turn turn = at.wish(pack(3, 6));
  EXPECT_EQ(kept_of(turn), (std::vector{0, 1}));
  ASSERT_EQ(turn.answers.size(), 1U);
  EXPECT_EQ(turn.answers.front().client, 6U);
}

TEST(SizeChanges, AJoinerThatHasGoneWhileItWaitedIsNotAdmitted) {
  Boundary at({1, 1});
  at.changes->defer(*at.joiners(2).change);
  const Turn one = at.joiners(1, /*first_client=*/2);
  ASSERT_TRUE(one.change);
  ASSERT_EQ(one.change->joiners.size(), 1U);
  EXPECT_EQ(one.change->joiners.front().client, 2U);
  at.changes->defer(*one.change);
  expect_nothing(at.next());
  // Who was drained in the same change leaves all the same.
  at.changes->defer(*at.joiners(1).change);
  const Turn both = at.leave({1});
  EXPECT_EQ(kept_of(both), (std::vector{0}));
  EXPECT_TRUE(both.change->joiners.empty());
}

TEST(SizeChanges, PackRanksIsDoneOnceWhenCostsAreKnown) {
  Boundary at({1, 1, 1}, 1, [](Config& config) { config.elastic.pack_ranks = 2; });
  expect_nothing(at.changes->next({}, at.view, at.plan, 0, /*costs_known=*/false));
  const Turn turn = at.next();
  EXPECT_EQ(kept_of(turn), (std::vector{0, 1}));
  EXPECT_EQ(turn.change->client, 0U);
  expect_nothing(at.next());
  Boundary few({1, 1}, 1, [](Config& config) { config.elastic.pack_ranks = 2; });
  expect_nothing(few.next());
}

// Steps until idle ranks are released; -1: not within 40.
int steps_until_release(Boundary& at) {
  for (int i = 0; i < 40; ++i) {
    if (at.next().change) return i;
  }
  return -1;
}

TEST(SizeChanges, IdleRanksAreReleasedAfterAWhile) {
  const auto automatic = [](Config& config) {
    config.elastic.pack = "auto";
    config.elastic.release_after = 4;
  };
  Boundary at({3, 3, 0, 0}, 1, automatic);
  for (int i = 0; i < 4; ++i) expect_nothing(at.next());
  const Turn turn = at.next();
  EXPECT_EQ(kept_of(turn), (std::vector{0, 1}));
  EXPECT_EQ(turn.change->why, "2 ranks were without layers for 4 steps");
  at.changes->done();  // it changed, or was refused
  EXPECT_EQ(steps_until_release(at), 4);

  // Another plan starts the time anew; none where all work.
  at.plan = plan::make_plan({3, 2, 1, 0}, schedule::ScheduleKind::k1F1B);
  EXPECT_EQ(steps_until_release(at), 4);
  EXPECT_EQ(kept_of(at.next()), (std::vector{0, 1, 2}));
  at.plan = plan::make_plan({2, 2, 1, 1}, schedule::ScheduleKind::k1F1B);
  EXPECT_EQ(steps_until_release(at), -1);

  Boundary never({3, 3, 0, 0});
  EXPECT_EQ(steps_until_release(never), -1);
}

TEST(SizeChanges, ReleaseKeepsWhoLeadsAndAsManyAsAreWanted) {
  const auto keep_three = [](Config& config) {
    config.elastic.pack = "auto";
    config.elastic.release_after = 1;
    config.elastic.ranks_min = 3;
  };
  Boundary at({0, 0, 0, 6, 0}, 1, keep_three);
  expect_nothing(at.next());
  EXPECT_EQ(kept_of(at.next()), (std::vector{0, 1, 3}));
  Boundary all({3, 3, 0}, 1, keep_three);
  EXPECT_EQ(steps_until_release(all), -1);
}

TEST(SizeChanges, WordsAreReadAsTheyWereWritten) {
  EXPECT_EQ(to_text(RankWord()), "");
  EXPECT_TRUE(parse_word("")->wishes.empty());
  RankWord word{.leave = true};
  word.wishes = {
      pack(3, process::ClientId{1} << 40), drain(7), {.kind = RequestKind::kStop, .client = 2}};
  word.joiners = {
      {.client = 9, .member = {.id = {77}, .number = 4, .host = "h", .pid = 5, .address = "a:1"}}};
  const auto read = parse_word(to_text(word));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_TRUE(read->leave);
  EXPECT_EQ(to_text(*read), to_text(word));
  ASSERT_EQ(read->wishes.size(), 3U);
  EXPECT_EQ(read->wishes[0].kind, RequestKind::kPack);
  EXPECT_EQ(read->wishes[0].client, process::ClientId{1} << 40);
  EXPECT_EQ(read->wishes[1].member, 7);
  ASSERT_EQ(read->joiners.size(), 1U);
  EXPECT_EQ(read->joiners[0].member, word.joiners[0].member);
  for (const char* text : {"x", "{}", "[]", R"({"leave":1,"wishes":[],"joiners":[]})",
                           R"({"leave":true,"wishes":[{}],"joiners":[]})",
                           R"({"leave":true,"wishes":[],"joiners":[{"client":1}]})"}) {
    EXPECT_FALSE(parse_word(text)) << text;
  }
}

}  // namespace
}  // namespace dynmo::train
