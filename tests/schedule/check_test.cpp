// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/check.h"

#include <gtest/gtest.h>

#include <array>

#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "tests/schedule/brute_force.h"
#include "tests/schedule/random_pipelines.h"
#include "tests/support/samples.h"

namespace dynmo::schedule {
namespace {

using testing::brute_force_accepts;
using testing::even_shape;
using testing::pick;

// Lists as text, one string a rank.
Schedule written(const PipelineShape& shape, const std::vector<std::string>& lists) {
  Schedule schedule{.shape = shape, .ranks = {}, .lowered = true};
  for (const std::string& list : lists) {
    std::vector<Action>& actions = schedule.ranks.emplace_back();
    for (std::size_t at = 0; at < list.size();) {
      const std::size_t end = std::min(list.find(' ', at), list.size());
      actions.push_back(*parse_action(std::string_view(list).substr(at, end - at)));
      at = end + 1;
    }
  }
  return schedule;
}

std::string fault_of(const PipelineShape& shape, const std::vector<std::string>& lists) {
  const Schedule schedule = written(shape, lists);
  EXPECT_FALSE(brute_force_accepts(schedule));
  const Expected<ScheduleFacts> facts = check(schedule);
  return facts ? "valid" : facts.error().message;
}

TEST(Checker, ReportsActionsMessagesAndStashes) {
  const Expected<ScheduleFacts> facts =
      check(lower(*make_schedule(ScheduleKind::k1F1B, even_shape(3, 4, 1))));
  ASSERT_TRUE(facts);
  EXPECT_EQ(facts->in_flight, (std::vector<int>{0, 2, 1}));
  EXPECT_EQ(facts->actions, 4 + 8 + 8 + 2 * 12);
  EXPECT_EQ(facts->messages, 12);
}

TEST(Checker, WantsALoweredScheduleOfAValidShape) {
  Schedule schedule = *make_schedule(ScheduleKind::k1F1B, even_shape(2, 2));
  EXPECT_EQ(check(schedule).error().message,
            "a compute-only schedule; want one with sends and receives, lower it first");
  schedule = lower(schedule);
  schedule.ranks.pop_back();
  EXPECT_EQ(check(schedule).error().message, "1 lists of actions for 2 ranks; want one a rank");
  schedule.shape.micro_batches = 0;
  EXPECT_EQ(check(schedule).error().message, "0 micro-batches; want at least 1");
}

TEST(Checker, NamesActionsThatHaveNoPlace) {
  const PipelineShape shape = even_shape(2, 1, 1);
  const std::string sender = "0F0 0SEND_F0";
  const std::string receiver = "1RECV_F0 1F0 1B0";
  ASSERT_TRUE(check(written(shape, {sender, receiver})));
  EXPECT_EQ(fault_of(shape, {sender + " 1F0", receiver}),
            "1F0 on rank 0 is in the wrong list: stage 1 is on rank 1");
  EXPECT_EQ(fault_of(shape, {sender + " 2F0", receiver}),
            "2F0 on rank 0 names no stage; want one below 2");
  EXPECT_EQ(fault_of(shape, {sender + " 0F1", receiver}),
            "0F1 on rank 0 names no micro-batch; want one below 1");
  EXPECT_EQ(fault_of(shape, {sender + " 0B0", receiver}),
            "0B0 on rank 0 has no place: the stage is frozen and runs forward only");
  EXPECT_EQ(fault_of(shape, {sender, receiver + " 1SEND_B0"}),
            "1SEND_B0 on rank 1 has no peer: the neighbour is missing, on the same rank, or "
            "frozen");
  EXPECT_EQ(fault_of(shape, {sender, receiver + " 1B0"}),
            "1B0 stands twice on rank 1, at 2 and 3; want it once");
}

TEST(Checker, NamesWhatIsMissing) {
  const PipelineShape shape = even_shape(2, 1, 1);
  const std::string sender = "0F0 0SEND_F0";
  EXPECT_EQ(fault_of(shape, {sender, "1RECV_F0 1B0"}), "rank 1 has no 1F0; want it exactly once");
  EXPECT_EQ(fault_of(shape, {"0F0", "1RECV_F0 1F0 1B0"}),
            "rank 0 has no 0SEND_F0; want it exactly once");
  EXPECT_EQ(fault_of(shape, {"0F0", "1F0 1B0"}), "rank 0 has no 0SEND_F0; want it exactly once");
  EXPECT_EQ(fault_of(shape, {sender, "1RECV_F0 1F0"}),
            "stage 1 runs no backward for micro-batch 0; want either B, or I and W");
  EXPECT_EQ(fault_of(shape, {sender, "1RECV_F0 1F0 1I0"}),
            "stage 1 runs I for micro-batch 0; want either B, or I and W");
  EXPECT_EQ(fault_of(shape, {sender, "1RECV_F0 1F0 1B0 1W0"}),
            "stage 1 runs BW for micro-batch 0; want either B, or I and W");
}

TEST(Checker, NamesWhatStandsInTheWrongOrder) {
  const PipelineShape shape = even_shape(2, 1);
  const std::string first = "0F0 0SEND_F0 0RECV_B0 0B0";
  const std::string second = "1RECV_F0 1F0 1I0 1SEND_B0 1W0";
  ASSERT_TRUE(check(written(shape, {first, second})));
  EXPECT_EQ(fault_of(shape, {first, "1F0 1RECV_F0 1I0 1SEND_B0 1W0"}),
            "1F0 stands before 1RECV_F0 on rank 1; post a receive before the action that uses it");
  EXPECT_EQ(fault_of(shape, {first, "1RECV_F0 1F0 1SEND_B0 1I0 1W0"}),
            "1SEND_B0 stands before 1I0 on rank 1; send a value after the action that makes it");
  EXPECT_EQ(fault_of(shape, {first, "1RECV_F0 1F0 1W0 1I0 1SEND_B0"}),
            "1W0 stands before 1I0 on rank 1; run W after I");
  EXPECT_EQ(fault_of(shape, {first, "1RECV_F0 1I0 1F0 1SEND_B0 1W0"}),
            "1I0 stands before 1F0 on rank 1; run backward after forward");
  EXPECT_EQ(fault_of(even_shape(1, 2), {"0F0 0F1 0B1 0B0"}),
            "0B1 stands before 0B0 on rank 0; weight gradients are summed in micro-batch order");
  const PipelineShape together{
      .ranks = 1, .micro_batches = 1, .stages = {{.rank = Rank{0}}, {.rank = Rank{0}}}};
  EXPECT_EQ(fault_of(together, {"1F0 0F0 1B0 0B0"}),
            "1F0 stands before 0F0 on rank 0; a stage runs forward after the one before it");
  EXPECT_EQ(fault_of(together, {"0F0 1F0 0B0 1B0"}),
            "0B0 stands before 1B0 on rank 0; a stage runs backward after the one behind it");
}

TEST(Checker, ShowsBothEndsOfACrossedChannel) {
  EXPECT_EQ(explain(written(even_shape(2, 2, 2),
                            {"0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1"})),
            "rank 1 posts 1RECV_F1 where rank 0 posts 0SEND_F0: the ends of a channel disagree; "
            "want one order at both\n"
            "rank 0 | 0F0        >0SEND_F0< 0F1 0SEND_F1\n"
            "rank 1 | >1RECV_F1< 1RECV_F0   1F0 1F1\n");
}

TEST(Checker, ShowsTheRanksOfADeadlock) {
  const Schedule stuck =
      written(even_shape(2, 2), {"0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
                                 "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"});
  EXPECT_FALSE(brute_force_accepts(stuck));
  EXPECT_EQ(explain(stuck),
            "deadlock: 0B0 on rank 0 waits for 1SEND_B0, 1F1 on rank 1 waits for 0SEND_F1; want "
            "one of these sends made before its rank waits\n"
            "rank 0 | 0F0      0SEND_F0 0RECV_B0 >0B0< 0F1 0SEND_F1 0RECV_B1 0B1\n"
            "rank 1 | 1RECV_F0 1F0      1RECV_F1 >1F1< 1B0 1SEND_B0 1B1      1SEND_B1\n");
}

TEST(Checker, MarksOnlyTheCycleOfADeadlock) {
  // Rank 2 is behind the two that wait for each other, and cannot go on either.
  const Schedule stuck = written(
      even_shape(3, 2), {"0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
                         "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1RECV_B0 1RECV_B1 1F1 1SEND_F1 1B0 "
                         "1SEND_B0 1B1 1SEND_B1",
                         "2RECV_F0 2RECV_F1 2F0 2F1 2B0 2SEND_B0 2B1 2SEND_B1"});
  const std::optional<Fault> fault = find_fault(stuck);
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->marked, (std::vector<Position>{{Rank{0}, 3}, {Rank{1}, 6}}));
}

TEST(Checker, ShowsOnlyTheSurroundingsOfAFaultInALongSchedule) {
  Schedule schedule = lower(*make_schedule(ScheduleKind::k1F1B, even_shape(2, 100)));
  std::vector<Action>& list = schedule.ranks[1];
  const auto b50 = std::find(list.begin(), list.end(), *parse_action("1B50"));
  const auto b51 = std::find(list.begin(), list.end(), *parse_action("1B51"));
  std::iter_swap(b50, b51);
  const std::string text = explain(schedule);
  EXPECT_NE(text.find("... "), std::string::npos) << text;
  EXPECT_NE(text.find(">1B50<"), std::string::npos) << text;
  EXPECT_LT(text.size(), 1000U);
}

// How a valid schedule is broken. Dropping and crossing always break it, the others may not.
enum class Mutation {
  kSwap,          // two actions of a rank exchanged
  kSwapAdjacent,  // two neighbouring ones
  kDropOneEnd,    // a send or a receive removed
  kDropMessage,   // both ends of a message removed
  kCross,         // two messages of a channel exchanged at one end
  kCrossBoth,     // and at both ends: may stay valid
  kMove,          // an action put elsewhere on its rank
  kDuplicate,     // an action repeated elsewhere on its rank
  kReplace,       // an action replaced by any other of the shape, or beyond it
  kHasten,        // a compute action put a little earlier, with its messages: may deadlock
};
constexpr int kMutations = 10;

struct Place {
  std::size_t rank = 0;
  std::size_t index = 0;
};

std::vector<Place> places(const Schedule& schedule, bool messages_only) {
  std::vector<Place> found;
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r) {
    for (std::size_t i = 0; i < schedule.ranks[r].size(); ++i) {
      if (!messages_only || !is_compute(schedule.ranks[r][i].kind)) found.push_back({r, i});
    }
  }
  return found;
}

Place place_of(const Schedule& schedule, const Action& action) {
  for (const Place& place : places(schedule, false)) {
    if (schedule.ranks[place.rank][place.index] == action) return place;
  }
  ADD_FAILURE() << "no " << to_string(action);
  return {};
}

void remove(Schedule& schedule, Place place) {
  std::vector<Action>& list = schedule.ranks[place.rank];
  list.erase(list.begin() + static_cast<std::ptrdiff_t>(place.index));
}

void insert(Schedule& schedule, Place place, const Action& action) {
  std::vector<Action>& list = schedule.ranks[place.rank];
  list.insert(list.begin() + static_cast<std::ptrdiff_t>(place.index), action);
}

void swap_actions(Schedule& schedule, const Action& a, const Action& b) {
  const Place first = place_of(schedule, a);
  const Place second = place_of(schedule, b);
  std::swap(schedule.ranks[first.rank][first.index], schedule.ranks[second.rank][second.index]);
}

int below(Rng& rng, std::size_t bound) { return pick(rng, 0, static_cast<int>(bound) - 1); }

// Needs at least two micro-batches, a message, and so two actions on some rank.
Schedule mutated(Rng& rng, Schedule schedule, Mutation mutation) {
  const bool of_message = mutation == Mutation::kDropOneEnd || mutation == Mutation::kDropMessage ||
                          mutation == Mutation::kCross || mutation == Mutation::kCrossBoth;
  const std::vector<Place> all = places(schedule, of_message);
  const Place place = all[rng.below(all.size())];
  std::vector<Action>& list = schedule.ranks[place.rank];
  const Action chosen = list[place.index];
  Action other = chosen;  // the same message of another micro-batch
  other.micro_batch.value =
      (chosen.micro_batch.value + pick(rng, 1, schedule.shape.micro_batches - 1)) %
      schedule.shape.micro_batches;
  const auto elsewhere = static_cast<std::size_t>(below(rng, list.size()));
  switch (mutation) {
    case Mutation::kSwap:
      std::swap(list[place.index], list[elsewhere]);
      break;
    case Mutation::kSwapAdjacent:
      std::swap(list[place.index], list[(place.index + 1) % list.size()]);
      break;
    case Mutation::kDropOneEnd:
      remove(schedule, place);
      break;
    case Mutation::kDropMessage:
      remove(schedule, place_of(schedule, peer(chosen)));
      remove(schedule, place_of(schedule, chosen));
      break;
    case Mutation::kCrossBoth:
      swap_actions(schedule, peer(chosen), peer(other));
      [[fallthrough]];
    case Mutation::kCross:
      swap_actions(schedule, chosen, other);
      break;
    case Mutation::kMove:
      remove(schedule, place);
      insert(schedule, {place.rank, std::min(elsewhere, list.size())}, chosen);
      break;
    case Mutation::kDuplicate:
      insert(schedule, {place.rank, elsewhere}, chosen);
      break;
    case Mutation::kReplace:
      list[place.index] =
          testing::action(static_cast<ActionKind>(pick(rng, 0, 7)),
                          pick(rng, -1, static_cast<int>(schedule.shape.stages.size())),
                          pick(rng, -1, schedule.shape.micro_batches));
      break;
    case Mutation::kHasten: {
      if (!is_compute(chosen.kind)) break;
      std::vector<Action> moved = {chosen};
      const auto receive = receive_for(schedule.shape, chosen);
      if (receive) moved.insert(moved.begin(), *receive);
      if (const auto send = send_of(schedule.shape, chosen)) moved.push_back(*send);
      std::size_t earlier = place.index - std::min<std::size_t>(place.index, rng.below(12));
      for (const Action& action : moved) {
        const Place from = place_of(schedule, action);
        earlier = std::min(earlier, from.index);
        remove(schedule, from);
        insert(schedule, {place.rank, earlier++}, action);
      }
      break;
    }
  }
  return schedule;
}

bool always_breaks(Mutation mutation) {
  return mutation == Mutation::kDropOneEnd || mutation == Mutation::kDropMessage ||
         mutation == Mutation::kCross || mutation == Mutation::kDuplicate;
}

// A template, or an order of several stages a rank with I and W; redrawn until it has what every
// mutation needs.
Schedule random_lowered(Rng& rng, bool crowded) {
  while (true) {
    const ScheduleKind kind = testing::kTemplates[rng.below(testing::kTemplates.size())];
    const auto [shape, options] =
        crowded ? testing::Pipeline{.shape = testing::random_crowded_shape(rng)}
                : testing::random_pipeline(rng, kind);
    Schedule lowered = lower(crowded ? testing::random_schedule(rng, shape)
                                     : *make_schedule(kind, shape, options));
    if (shape.micro_batches > 1 && !places(lowered, true).empty()) return lowered;
  }
}

struct Verdicts {
  std::array<int, kMutations> valid{};
  std::array<int, kMutations> broken{};
  int deadlocks = 0;
};

// A deadlock's fault names the actions that wait for each other: each is where its rank stopped, at
// least two ranks are in it, and the message has them all.
void expect_names_the_stuck(const Schedule& schedule, const Fault& fault) {
  testing::BruteForce oracle(schedule);
  EXPECT_FALSE(oracle.completes());
  EXPECT_GE(fault.marked.size(), 2U);
  for (const Position& position : fault.marked) {
    EXPECT_EQ(static_cast<std::size_t>(position.index), oracle.stopped_at(position.rank));
    const Action& stuck =
        schedule.ranks[position.rank.index()][static_cast<std::size_t>(position.index)];
    const std::string named = fmt::format("{} on rank {} waits", to_string(stuck), position.rank);
    EXPECT_NE(fault.message.find(named), std::string::npos) << fault.message;
  }
}

Verdicts compare_verdicts(std::uint64_t key, int mutations, bool crowded) {
  Verdicts verdicts;
  for (int i = 0; i < mutations; ++i) {
    Rng rng(mix_key({key, static_cast<std::uint64_t>(i)}));
    const auto mutation = static_cast<Mutation>(i % kMutations);
    const Schedule whole = random_lowered(rng, crowded);
    EXPECT_TRUE(brute_force_accepts(whole)) << "key " << key << ", mutation " << i;
    EXPECT_EQ(explain(whole), "") << "key " << key << ", mutation " << i;
    const Schedule schedule = mutated(rng, whole, mutation);
    const std::optional<Fault> fault = find_fault(schedule);
    const bool valid = !fault;
    EXPECT_EQ(valid, brute_force_accepts(schedule))
        << "key " << key << ", mutation " << i << " of kind " << i % kMutations << "\n"
        << explain(schedule) << to_grid(schedule);
    if (always_breaks(mutation)) {
      EXPECT_FALSE(valid) << "key " << key << ", mutation " << i << "\n" << to_grid(schedule);
    }
    if (fault && fault->message.starts_with("deadlock")) {
      SCOPED_TRACE(fmt::format("key {}, mutation {}", key, i));
      expect_names_the_stuck(schedule, *fault);
      ++verdicts.deadlocks;
    }
    ++(valid ? verdicts.valid : verdicts.broken)[static_cast<std::size_t>(mutation)];
  }
  return verdicts;
}

// The swaps must try both verdicts, or agreement would mean little.
void expect_both_verdicts(const Verdicts& verdicts) {
  for (const Mutation mutation : {Mutation::kSwap, Mutation::kSwapAdjacent, Mutation::kMove}) {
    EXPECT_GT(verdicts.valid[static_cast<std::size_t>(mutation)], samples(10));
    EXPECT_GT(verdicts.broken[static_cast<std::size_t>(mutation)], samples(10));
  }
  EXPECT_GT(verdicts.deadlocks, samples(10));
}

TEST(Checker, AgreesWithBruteForceOnMutatedTemplates) {
  expect_both_verdicts(compare_verdicts(21, samples(5000), false));
}

TEST(Checker, AgreesWithBruteForceOnMutatedOrdersOfSeveralStagesARank) {
  expect_both_verdicts(compare_verdicts(22, samples(3000), true));
}

}  // namespace
}  // namespace dynmo::schedule
