// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/size_changes.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "dynmo/core/rng.h"

namespace dynmo::elastic {
namespace {

// A run of `replicas` x as many ranks as the cut has parts; the number of a member is 10 more than
// its place, so that neither is taken for the other.
struct Boundary {
  explicit Boundary(const std::vector<int>& cut, int replicas = 1,
                    const std::function<void(SizeOptions&)>& set = {})
      : plan(plan::make_plan(cut, schedule::ScheduleKind::k1F1B)) {
    SizeOptions options;
    if (set) set(options);
    changes.emplace(options);
    for (int i = 0; i < replicas * plan.ranks; ++i) {
      view.members.push_back({.id = {static_cast<std::uint64_t>(i) + 1}, .number = 10 + i});
    }
    silent.resize(view.members.size());
  }
  BoundaryDecision next(const std::vector<RankRequest>& requests) {
    return changes->next(requests, view, plan, step++, /*costs_known=*/true);
  }
  BoundaryDecision next() { return next({}); }
  BoundaryDecision ask(const ClientRequest& request) { return ask_all({request}); }
  BoundaryDecision ask_all(std::vector<ClientRequest> all) {
    std::vector<RankRequest> requests = silent;
    requests.front().requests = std::move(all);
    return next(requests);
  }
  BoundaryDecision leave(const std::vector<int>& places) {
    std::vector<RankRequest> requests = silent;
    for (const int place : places) requests[static_cast<std::size_t>(place)].leave = true;
    return next(requests);
  }
  BoundaryDecision newcomers(int count, int first_client = 1) {
    std::vector<RankRequest> requests = silent;
    for (int i = 0; i < count; ++i) {
      const auto client = static_cast<process::ClientId>(first_client + i);
      requests.front().newcomers.push_back({.client = client, .member = {.id = {100 + client}}});
    }
    return next(requests);
  }

  plan::Plan plan;
  std::optional<SizeChanges> changes;
  View view;
  std::vector<RankRequest> silent;
  std::int64_t step = 0;
};

std::vector<int> kept_of(const BoundaryDecision& decision) {
  std::vector<int> kept;
  if (!decision.change) return kept;
  for (const Rank rank : decision.change->kept) kept.push_back(rank.value);
  return kept;
}

void expect_refusal(const BoundaryDecision& decision, process::ClientId client,
                    std::string_view names) {
  EXPECT_FALSE(decision.change);
  ASSERT_EQ(decision.answers.size(), 1U);
  EXPECT_EQ(decision.answers.front().client, client);
  EXPECT_FALSE(decision.answers.front().reply.done);
  EXPECT_EQ(decision.answers.front().reply.code, ErrorCode::kBadInput);
  EXPECT_NE(decision.answers.front().reply.text.find(names), std::string::npos)
      << decision.answers.front().reply.text;
}

void expect_nothing(const BoundaryDecision& decision) {
  EXPECT_FALSE(decision.change || decision.checkpoint || decision.stop);
  EXPECT_TRUE(decision.answers.empty() && decision.wait_for_checkpoint.empty() &&
              decision.wait_for_stop.empty());
}

ClientRequest pack(int ranks, process::ClientId client = 5) {
  return {.kind = RequestKind::kPack, .client = client, .ranks = ranks};
}
ClientRequest drain(int member, process::ClientId client = 5) {
  return {.kind = RequestKind::kDrain, .client = client, .member = member};
}

TEST(SizeChanges, WhereNobodySaysAnythingNothingHappens) {
  Boundary at({2, 2, 2});
  expect_nothing(at.next());
  expect_nothing(at.next(at.silent));
  // These were answered without the training loop.
  for (const RequestKind kind : {RequestKind::kStatus, RequestKind::kConfig, RequestKind::kJoin}) {
    expect_nothing(at.ask({.kind = kind, .client = 1}));
  }
}

TEST(SizeChanges, PackKeepsTheLowestPositions) {
  Boundary at({2, 2, 2, 2});
  const BoundaryDecision decision = at.ask(pack(2));
  EXPECT_EQ(kept_of(decision), (std::vector{0, 1}));
  EXPECT_EQ(decision.change->client, 5U);
  EXPECT_EQ(decision.change->why, "packed onto 2 ranks");
  EXPECT_TRUE(decision.answers.empty()) << "the client hears when it is done";
}

TEST(SizeChanges, PackEmptiesWholeHostsFirst) {
  Boundary at({2, 2, 2, 2});
  for (const auto& [hosts, kept] : {std::pair{"abab", std::vector{0, 2}},
                                    {"abba", std::vector{0, 3}},
                                    {"aabb", std::vector{0, 1}},
                                    {"abbb", std::vector{1, 2}}}) {
    for (std::size_t i = 0; i < 4; ++i) at.view.members[i].host = hosts[i];
    EXPECT_EQ(kept_of(at.ask(pack(2))), kept) << hosts;
  }
  // Each replica has hosts of its own.
  Boundary replicas({2, 2, 2, 2}, 2);
  for (std::size_t i = 0; i < 8; ++i) replicas.view.members[i].host = "ababcdcd"[i];
  EXPECT_EQ(kept_of(replicas.ask(pack(2))), (std::vector{0, 2}));
}

TEST(SizeChanges, PackOntoMoreRanksThanItHasOrTooFewIsRefused) {
  const auto two_at_least = [](SizeOptions& options) { options.ranks_min = 2; };
  Boundary at({2, 2, 2}, 1, two_at_least);
  const BoundaryDecision same = at.ask(pack(3));
  ASSERT_EQ(same.answers.size(), 1U);
  EXPECT_TRUE(same.answers.front().reply.done && !same.change);
  EXPECT_EQ(same.answers.front().reply.text, "the run is on 3 ranks already");
  expect_refusal(at.ask(pack(9)), 5, "ctl RUN grow");
  expect_refusal(at.ask(pack(1)), 5, "ranks_min = 2");
  EXPECT_EQ(kept_of(at.ask(pack(2))), (std::vector{0, 1}));
}

TEST(SizeChanges, OneChangeAtATime) {
  Boundary at({2, 2, 2, 2});
  const BoundaryDecision decision = at.ask_all({pack(3, 5), pack(2, 6), drain(11, 7)});
  EXPECT_EQ(kept_of(decision), (std::vector{0, 1, 2}));
  EXPECT_EQ(decision.change->client, 5U);
  ASSERT_EQ(decision.answers.size(), 2U);
  EXPECT_EQ(decision.answers[0].client, 6U);
  EXPECT_EQ(decision.answers[1].client, 7U);
  for (const BoundaryDecision::Answer& answer : decision.answers) {
    EXPECT_NE(answer.reply.text.find("another change is under way"), std::string::npos);
  }
}

TEST(SizeChanges, ADrainedMemberLeavesWithItsPositionInAllReplicas) {
  for (const int member : {12, 15}) {  // position 2 of either replica
    Boundary at({2, 2, 2}, 2);
    const BoundaryDecision decision = at.ask(drain(member));
    EXPECT_EQ(kept_of(decision), (std::vector{0, 1}));
    EXPECT_EQ(decision.change->why, fmt::format("rank {} was drained", member));
    EXPECT_EQ(decision.change->client, 5U);
  }
}

TEST(SizeChanges, WhoLeadsCanBeDrained) {
  for (const int member : {10, 13}) {  // position 0 of either replica
    Boundary at({2, 2, 2}, 2);
    EXPECT_EQ(kept_of(at.ask(drain(member))), (std::vector{1, 2}));
  }
}

TEST(SizeChanges, WhoIsNobodyAndTheLastOneCannotBeDrained) {
  Boundary at({2, 2, 2}, 2, [](SizeOptions& options) { options.ranks_min = 3; });
  expect_refusal(at.ask(drain(2)), 5, "wanted one of 10, 11, 12, 13, 14, 15");
  expect_refusal(at.ask(drain(11)), 5, "ranks_min is 3");
}

TEST(SizeChanges, ADrainJoinsWhatIsUnderWay) {
  Boundary at({1, 1, 1, 1, 1});
  const BoundaryDecision two = at.leave({2, 4});
  EXPECT_EQ(kept_of(two), (std::vector{0, 1, 3}));
  EXPECT_EQ(two.change->why, "rank 12 was drained, rank 14 was drained");
  EXPECT_EQ(two.change->client, 0U);

  // A client's change and a signal in one decision: the client hears of both.
  Boundary more({1, 1, 1, 1, 1});
  std::vector<RankRequest> requests = more.silent;
  requests.front().requests = {drain(13, 5)};
  requests[1].leave = true;
  const BoundaryDecision decision = more.next(requests);
  EXPECT_EQ(kept_of(decision), (std::vector{0, 2, 4}));
  EXPECT_EQ(decision.change->client, 5U);
}

TEST(SizeChanges, WhoAskedToLeaveIsNotDrainedTwice) {
  Boundary at({1, 1, 1, 1});
  at.changes->defer(*at.leave({2}).change);
  for (int i = 0; i < 20; ++i) {  // the signal stays
    BoundaryDecision decision = at.leave({2});
    ASSERT_TRUE(decision.change);
    EXPECT_EQ(decision.change->why, "rank 12 was drained");
    EXPECT_TRUE(decision.answers.empty());
    at.changes->defer(*std::move(decision.change));
  }
  std::vector<RankRequest> requests = at.silent;
  requests.front().requests = {drain(12)};
  const BoundaryDecision decision = at.next(requests);
  ASSERT_EQ(decision.answers.size(), 1U);
  EXPECT_NE(decision.answers.front().reply.text.find("leaves already"), std::string::npos);
}

TEST(SizeChanges, WhoCannotLeaveIsToldSoNowAndThen) {
  Boundary at({1, 1}, 1, [](SizeOptions& options) {
    options.ranks_min = 2;
    options.release_after = 4;
  });
  int told = 0;
  for (int i = 0; i < 12; ++i) {
    const BoundaryDecision decision = at.leave({1});
    EXPECT_FALSE(decision.change);
    told += static_cast<int>(decision.answers.size());
  }
  EXPECT_EQ(told, 3);
}

TEST(SizeChanges, TheRunStopsWhenAllAreAskedToLeave) {
  Boundary at({1, 1, 1});
  const BoundaryDecision some = at.leave({0, 2});
  EXPECT_FALSE(some.stop);
  EXPECT_EQ(kept_of(some), (std::vector{1}));
  const BoundaryDecision all = at.leave({0, 1, 2});
  EXPECT_EQ(all.stop, "all ranks were asked to leave");
}

TEST(SizeChanges, WhoAsksWhileAllAreAskedToLeaveHearsOfTheEnd) {
  Boundary at({1, 1});
  std::vector<RankRequest> requests = at.silent;
  for (RankRequest& request : requests) request.leave = true;
  requests.front().requests = {{.kind = RequestKind::kStop, .client = 3},
                               {.kind = RequestKind::kCheckpoint, .client = 4}};
  const BoundaryDecision decision = at.next(requests);
  EXPECT_TRUE(decision.stop);
  EXPECT_EQ(decision.wait_for_stop, (std::vector<process::ClientId>{3}));
  EXPECT_EQ(decision.wait_for_checkpoint, (std::vector<process::ClientId>{4}));
}

TEST(SizeChanges, StopAndCheckpointAreTheClientsToHearOf) {
  Boundary at({1, 1});
  const BoundaryDecision decision = at.ask_all({{.kind = RequestKind::kCheckpoint, .client = 3},
                                                {.kind = RequestKind::kCheckpoint, .client = 4},
                                                {.kind = RequestKind::kStop, .client = 5}});
  EXPECT_TRUE(decision.checkpoint);
  EXPECT_EQ(decision.stop, "dynmo ctl stop");
  EXPECT_EQ(decision.wait_for_checkpoint, (std::vector<process::ClientId>{3, 4}));
  EXPECT_EQ(decision.wait_for_stop, (std::vector<process::ClientId>{5}));
  EXPECT_TRUE(decision.answers.empty());
}

TEST(SizeChanges, JoinersWaitForWhoLeaves) {
  Boundary at({1, 1, 1});
  std::vector<RankRequest> requests = at.silent;
  requests.front().newcomers = {{.client = 1, .member = {.id = {101}}}};
  requests[2].leave = true;
  const BoundaryDecision first = at.next(requests);
  EXPECT_EQ(kept_of(first), (std::vector{0, 1}));
  EXPECT_TRUE(first.change->newcomers.empty());
  const BoundaryDecision second = at.newcomers(2);
  EXPECT_EQ(kept_of(second), (std::vector{0, 1, 2}));
  EXPECT_EQ(second.change->newcomers.size(), 2U);
  EXPECT_EQ(second.change->why, "ranks have joined");
  EXPECT_EQ(at.newcomers(1).change->why, "a rank has joined");
}

TEST(SizeChanges, AChangeThatHasToWaitComesAgain) {
  Boundary at({1, 1, 1, 1});
  SizeChange change = *at.ask(pack(2)).change;
  for (int waited = 1; waited < 4; ++waited) {
    at.changes->defer(std::move(change));
    BoundaryDecision decision = at.next();
    EXPECT_EQ(kept_of(decision), (std::vector{0, 1}));
    ASSERT_TRUE(decision.change);
    EXPECT_EQ(decision.change->waited, waited);
    EXPECT_EQ(decision.change->client, 5U);
    change = *std::move(decision.change);
  }
  expect_nothing(at.next());  // unless it is deferred again
  // Meanwhile nobody else's begins.
  at.changes->defer(std::move(change));
  const BoundaryDecision decision = at.ask(pack(3, 6));
  EXPECT_EQ(kept_of(decision), (std::vector{0, 1}));
  ASSERT_EQ(decision.answers.size(), 1U);
  EXPECT_EQ(decision.answers.front().client, 6U);
}

TEST(SizeChanges, AJoinerThatHasGoneWhileItWaitedIsNotAdmitted) {
  Boundary at({1, 1});
  at.changes->defer(*at.newcomers(2).change);
  const BoundaryDecision one = at.newcomers(1, /*first_client=*/2);
  ASSERT_TRUE(one.change);
  ASSERT_EQ(one.change->newcomers.size(), 1U);
  EXPECT_EQ(one.change->newcomers.front().client, 2U);
  at.changes->defer(*one.change);
  expect_nothing(at.next());
  // Who was drained in the same change leaves all the same.
  at.changes->defer(*at.newcomers(1).change);
  const BoundaryDecision both = at.leave({1});
  EXPECT_EQ(kept_of(both), (std::vector{0}));
  EXPECT_TRUE(both.change->newcomers.empty());
}

TEST(SizeChanges, PackRanksIsDoneOnceWhenCostsAreKnown) {
  Boundary at({1, 1, 1}, 1, [](SizeOptions& options) { options.pack_ranks = 2; });
  expect_nothing(at.changes->next({}, at.view, at.plan, 0, /*costs_known=*/false));
  const BoundaryDecision decision = at.next();
  EXPECT_EQ(kept_of(decision), (std::vector{0, 1}));
  EXPECT_EQ(decision.change->client, 0U);
  expect_nothing(at.next());
  Boundary few({1, 1}, 1, [](SizeOptions& options) { options.pack_ranks = 2; });
  expect_nothing(few.next());
}

TEST(SizeChanges, AReleaseSaysWhoStaysAndWhy) {
  const plan::Plan plan = plan::make_plan({3, 3, 0, 0}, schedule::ScheduleKind::k1F1B);
  const SizeChange change = change_of({.kept = {Rank(0), Rank(1)}, .idle_steps = 4}, plan);
  EXPECT_EQ(change.kept, (std::vector{Rank(0), Rank(1)}));
  EXPECT_EQ(change.why, "2 ranks were without layers for 4 steps");
  EXPECT_EQ(change_of({.kept = {Rank(0), Rank(1), Rank(2)}, .idle_steps = 9}, plan).why,
            "a rank was without layers for 9 steps");
}

// A rank that joins decides what the others decide, whatever has happened before it came.
TEST(SizeChanges, WhoTakesTheStateOverDecidesAlike) {
  const auto set = [](SizeOptions& options) {
    options.ranks_min = 2;
    options.pack_ranks = 2;
    options.release_after = 4;
  };
  Rng rng(3);
  for (int round = 0; round < 500; ++round) {
    SCOPED_TRACE(round);
    Boundary at({2, 2, 0}, 1, set);
    Boundary newcomer({2, 2, 0}, 1, set);
    const std::uint64_t joins = rng.below(12);
    for (std::uint64_t i = 0; i < 24; ++i, ++newcomer.step) {
      if (rng.below(4) == 0) at.plan = plan::make_plan({2, 2, 0}, schedule::ScheduleKind::k1F1B);
      if (rng.below(8) == 0) at.plan = plan::make_plan({2, 1, 1}, schedule::ScheduleKind::k1F1B);
      std::vector<RankRequest> requests;
      if (rng.below(2) == 0) {
        requests = at.silent;
        requests[rng.below(3)].leave = true;
      }
      if (i == joins) {
        const auto state = parse_json(at.changes->state().dump(), "state");
        ASSERT_TRUE(state && newcomer.changes->restore(*state));
      }
      newcomer.plan = at.plan;
      const BoundaryDecision theirs = at.next(requests);
      if (i < joins) continue;
      const BoundaryDecision mine = newcomer.next(requests);
      --newcomer.step;
      ASSERT_EQ(kept_of(mine), kept_of(theirs)) << "boundary " << i;
      ASSERT_EQ(mine.answers.size(), theirs.answers.size()) << "boundary " << i;
      ASSERT_EQ(newcomer.changes->state(), at.changes->state());
    }
  }
}

TEST(SizeChanges, ARefusedRankIsNotTriedEarlierByWhoJoins) {
  const auto set = [](SizeOptions& options) { options.ranks_min = 2; };
  Boundary at({1, 1}, 1, set);
  EXPECT_EQ(at.leave({1}).answers.size(), 1U);  // refused
  Boundary newcomer({1, 1, 1}, 1, set);
  ASSERT_TRUE(newcomer.changes->restore(at.changes->state()));
  newcomer.step = at.step;
  for (int i = 1; i < 10; ++i) expect_nothing(newcomer.leave({1}));
  EXPECT_EQ(kept_of(newcomer.leave({1})), (std::vector{0, 2}));
}

TEST(SizeChanges, AStateThatIsNoneIsRefused) {
  Boundary at({1, 1});
  for (const char* text :
       {"null", "[]", "{}", R"({"tried":1,"packed":true})", R"({"tried":[],"packed":2})"}) {
    EXPECT_FALSE(at.changes->restore(Json::parse(text))) << text;
  }
}

TEST(SizeChanges, RequestsAreReadAsTheyWereWritten) {
  EXPECT_TRUE(to_json(RankRequest()).is_null());
  EXPECT_TRUE(parse_rank_request(nullptr)->requests.empty());
  RankRequest request{.leave = true};
  request.requests = {
      pack(3, process::ClientId{1} << 40), drain(7), {.kind = RequestKind::kStop, .client = 2}};
  request.newcomers = {
      {.client = 9, .member = {.id = {77}, .number = 4, .host = "h", .pid = 5, .address = "a:1"}}};
  const auto read = parse_rank_request(to_json(request));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_TRUE(read->leave);
  EXPECT_EQ(to_json(*read), to_json(request));
  ASSERT_EQ(read->requests.size(), 3U);
  EXPECT_EQ(read->requests[0].kind, RequestKind::kPack);
  EXPECT_EQ(read->requests[0].client, process::ClientId{1} << 40);
  EXPECT_EQ(read->requests[1].member, 7);
  ASSERT_EQ(read->newcomers.size(), 1U);
  EXPECT_EQ(read->newcomers[0].member, request.newcomers[0].member);
  for (const char* text : {"1", "{}", "[]", R"({"leave":1,"requests":[],"newcomers":[]})",
                           R"({"leave":true,"requests":[{}],"newcomers":[]})",
                           R"({"leave":true,"requests":[],"newcomers":[{"client":1}]})"}) {
    EXPECT_FALSE(parse_rank_request(Json::parse(text))) << text;
  }
}

}  // namespace
}  // namespace dynmo::elastic
