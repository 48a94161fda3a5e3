// SPDX-License-Identifier: Apache-2.0
// Layers that move while a step runs: the bits of one rank, and a whole copy whatever fails.
#include "dynmo/runtime/background_move.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <mutex>
#include <optional>

#include "dynmo/model/decoder.h"
#include "dynmo/runtime/regroup.h"
#include "tests/runtime/generations.h"
#include "tests/runtime/named_sources.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

using transport::Fault;
using transport::Transport;

constexpr std::uint64_t kSeed = 31;
constexpr int kRanks = 3;
constexpr int kMicroBatches = 6;

// Moves before every third step as random_plans does, and counts the plans that came into force a
// step later.
struct Moves {
  std::mutex mutex;
  int begun = 0;
  int in_force = 0;

  std::function<Expected<void>(Pipeline&, std::int64_t)> hook() {
    const auto begin = random_plans(kSeed, kRanks, kMicroBatches, {}, MoveHow::kDuringStep);
    return [this, begin](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
      const Generation before = pipeline.plan().generation;
      DYNMO_TRY(begin(pipeline, step));
      const bool first = pipeline.grid().rank() == WorldRank(0);
      const std::lock_guard lock(mutex);
      if (first && step % 3 == 2) {
        ++begun;
        if (pipeline.plan().generation != before) ++in_force;  // no layer moved
      } else if (first && pipeline.coming_plan() != nullptr) {
        ++in_force;
      }
      return {};
    };
  }
};

struct Case {
  const char* name;
  RunOptions run;
};

RunOptions with_ties(at::ScalarType type) {
  model::LlamaConfig config = small_model();
  config.tied_embeddings = true;
  RunOptions run;
  run.layers = model::make_decoder(config);
  run.ties = model::ties(model::DecoderConfig(config));
  if (type == at::kBFloat16) run.precision = cost::Precision::kBf16;
  return run;
}

RunOptions with_sources(const char* name) {
  const auto found = std::ranges::find_if(
      kSources, [&](const NamedSources& one) { return std::string_view(one.name) == name; });
  DYNMO_CHECK(found != std::end(kSources), "sources '{}'", name);
  model::LlamaConfig config = small_model();
  config.shape.blocks = found->blocks;
  RunOptions run;
  run.make_sources = found->make;
  run.layers = shaped(model::make_llama(config), run.make_sources);
  return run;
}

std::vector<Case> cases() {
  RunOptions plain;
  RunOptions freezes;
  freezes.freezing = freezing();
  RunOptions bf16;
  bf16.precision = cost::Precision::kBf16;
  bf16.freezing = freezing();
  RunOptions replicas;
  replicas.replicas = 2;
  replicas.accumulation = 2;
  RunOptions copied;
  copied.staging.copies = Staging::Copies::kAlways;
  return {{"Plain", plain},
          {"Freezing", freezes},
          {"Bf16", bf16},
          {"Replicas", replicas},
          {"Tied", with_ties(at::kFloat)},
          {"TiedBf16", with_ties(at::kBFloat16)},
          {"Pruning", with_sources("pruning and freezing")},
          {"Plasticity", with_sources("freezing by plasticity")},
          {"Exits", with_sources("early exit")},
          {"Experts",
           with_sources("early exit of experts by a bias, pruning and freezing by plasticity")},
          {"Copied", copied}};
}

class BackgroundMoves : public ::testing::TestWithParam<Case> {};

TEST_P(BackgroundMoves, EveryThirdStepChangeNoBit) {
  RunOptions alone = GetParam().run;
  alone.steps = 60;
  alone.micro_batches = kMicroBatches;
  alone.cut = {kLayers};
  RunOptions moving = alone;
  moving.cut = {3, 2, 3};
  Moves moves;
  moving.before_step = moves.hook();
  expect_same(run_pipeline(alone), run_pipeline(moving), fmt::format("seed {}", kSeed));
  EXPECT_EQ(moves.begun, 20);
  EXPECT_GE(moves.in_force, 19);  // the last one at the end of the run
}

INSTANTIATE_TEST_SUITE_P(Of, BackgroundMoves, ::testing::ValuesIn(cases()),
                         [](const auto& each) { return std::string(each.param.name); });

// ----------------------------------------------------------------------------------- failures

constexpr std::int64_t kMoveAt = 3;  // step during which layers move
constexpr int kSteps = 7;

const transport::Tag kExchangeTag = transport::control_tag(transport::Control::kExchange);

// The states that ranks have kept of a run which ends when a message of this rank fails. Those that
// have not got the exchange of the last step finish it with that of another rank, as the ranks that
// are left do after a loss.
struct Ended {
  bool failed = false;
  std::vector<RankState> states = {};
};

// A training of kSteps steps of the small model.
struct Training {
  Training() { run.steps = kSteps; }

  model::LlamaConfig config = small_model();
  model::Model layers = model::make_llama(config);
  RunOptions run = {};

  [[nodiscard]] PipelineOptions options() const { return pipeline_options(config, run); }
  [[nodiscard]] Pipeline::Batches batches() const {
    return [this](std::int64_t step, MicroBatchId id) { return batch(config, run.seed, step, id); };
  }
};

Ended run_until(const std::vector<int>& before, const std::vector<int>& wanted, int faulty,
                const Fault& fault) {
  const Training training;
  const model::Model& layers = training.layers;
  const PipelineOptions options = training.options();
  const Pipeline::Batches batches = training.batches();
  const auto ranks = static_cast<int>(before.size());
  Ended ended;
  ended.states = std::vector<RankState>(before.size());
  std::vector<std::optional<Exchange>> exchanges(before.size());
  std::vector<std::int64_t> steps(before.size());
  std::barrier all_have(ranks);
  const auto status = transport::run_ranks(ranks, [&](Transport& inner) -> Expected<void> {
    at::set_num_threads(1);
    const std::size_t rank = inner.rank().index();
    const auto group = transport::with_faults(
        inner, inner.rank().value == faulty ? std::vector{fault} : std::vector<Fault>());
    const plan::Plan plan = plan::make_plan(before, schedule::ScheduleKind::k1F1B);
    Pipeline pipeline(
        *group, layers, options,
        {.plan = plan,
         .layers = initial_states(layers, plan, Rank(inner.rank().value), training.run.seed)});
    const auto train = [&]() -> Expected<void> {
      for (int step = 0; step < kSteps; ++step) {
        if (step == kMoveAt) {
          DYNMO_TRY(pipeline.begin_move(
              plan::make_plan(wanted, schedule::ScheduleKind::k1F1B, plan.generation + 1)));
        }
        DYNMO_TRY(pipeline.step(batches));
      }
      return {};
    };
    const Expected<void> done = train();
    if (done) {
      EXPECT_EQ(pipeline.plan().generation, plan.generation + 1);
    }
    exchanges[rank] = pipeline.state().last_exchange;
    steps[rank] = pipeline.next_step();
    all_have.arrive_and_wait();
    for (std::size_t i = 0; i < exchanges.size(); ++i) {
      if (steps[i] != pipeline.next_step() + 1 || !pipeline.gradients_complete()) continue;
      EXPECT_TRUE(pipeline.finish_step(*exchanges[i]));
    }
    ended.states[rank] = pipeline.take_state();
    all_have.arrive_and_wait();
    return done;
  });
  ended.failed = !status.has_value();
  return ended;
}

// Trains on from the states of these ranks to the end.
Expected<std::map<int, std::string>> go_on(std::vector<RankState> states) {
  const Training training;
  const model::Model& layers = training.layers;
  const PipelineOptions options = training.options();
  const Pipeline::Batches batches = training.batches();
  const auto ranks = static_cast<int>(states.size());
  Rng rng(kSeed);
  const plan::Plan plan = plan::make_plan(random_cut(rng, kLayers, ranks),
                                          schedule::ScheduleKind::k1F1B, /*generation=*/9);
  std::map<int, std::string> digests;
  const auto done = transport::run_ranks(ranks, [&](Transport& group) -> Expected<void> {
    at::set_num_threads(1);
    RankState& state = states[group.rank().index()];
    DYNMO_TRY(regroup(transport::Grid(group, 1), layers, plan, state, training.run.staging));
    Pipeline pipeline(group, layers, options, std::move(state));
    while (pipeline.next_step() < kSteps) DYNMO_TRY(pipeline.step(batches));
    DYNMO_ASSIGN(auto all, gather_states(group, pipeline.states(), training.run.staging));
    if (group.rank() == transport::Member(0)) digests = std::move(all);
    return {};
  });
  if (!done) return done.error();
  return digests;
}

// Rank 0's: the other one is lost with all that it has.
std::vector<RankState> first_of(Ended& ended) {
  std::vector<RankState> one(1);
  one.front() = std::move(ended.states.front());
  return one;
}

const std::map<int, std::string>& alone() {
  static const std::map<int, std::string> kStates = live_alone(kSteps, RunOptions()).value().states;
  return kStates;
}

Fault failure(Fault::On on, transport::Tag first, transport::Tag last, int nth) {
  return {.on = on, .first_tag = first, .last_tag = last, .first = nth};
}
Fault failure_of_move(Fault::On on, int nth) {
  return failure(on, transport::migration_tag(LayerId(0)),
                 transport::migration_tag(LayerId(kLayers)), nth);
}

// Rank 1 takes layers of both its neighbours, or gives them some.
TEST(BackgroundMove, AFailureAtAnyOfItsMessagesLosesNoLayer) {
  const std::vector<std::vector<int>> plans = {{4, 2, 2}, {2, 5, 1}};
  int failures = 0;
  for (const bool forth : {true, false}) {
    for (int rank = 0; rank < 3; ++rank) {
      for (const Fault::On on : {Fault::On::kSend, Fault::On::kReceive}) {
        for (int nth = 0;; ++nth) {
          Ended ended =
              run_until(plans[forth ? 0 : 1], plans[forth ? 1 : 0], rank, failure_of_move(on, nth));
          if (!ended.failed) break;
          ++failures;
          const auto states = go_on(std::move(ended.states));
          const std::string what =
              fmt::format("rank {}, {} {}, {}", rank, on == Fault::On::kSend ? "send" : "receive",
                          nth, forth ? "forth" : "back");
          ASSERT_TRUE(states) << what << ": " << states.error().message;
          EXPECT_EQ(*states, alone()) << what;
        }
      }
    }
  }
  // Both ways, both ends, three layers: header, a piece, gradients, digest.
  EXPECT_GE(failures, 2 * 2 * 3 * 4);
}

// Some ranks have the exchange of the step then, and some the one after, under the new plan.
TEST(BackgroundMove, AFailureAtTheExchangeThatSettlesItLosesNoLayer) {
  for (int rank = 0; rank < 3; ++rank) {
    for (const Fault::On on : {Fault::On::kSend, Fault::On::kReceive}) {
      for (int nth = 2 * kMoveAt; nth < 2 * (kMoveAt + 2); ++nth) {
        Ended ended =
            run_until({4, 2, 2}, {2, 5, 1}, rank, failure(on, kExchangeTag, kExchangeTag, nth));
        const std::string what =
            fmt::format("rank {}, {} {}", rank, on == Fault::On::kSend ? "send" : "receive", nth);
        ASSERT_TRUE(ended.failed) << what;
        const auto states = go_on(std::move(ended.states));
        ASSERT_TRUE(states) << what << ": " << states.error().message;
        EXPECT_EQ(*states, alone()) << what;
      }
    }
  }
}

// Rank 1 is lost with all that it has while it takes layers: rank 0 has them still.
TEST(BackgroundMove, ARankThatIsLostWhileItTakesLayersTakesNoneAway) {
  int failures = 0;
  for (const Fault::On on : {Fault::On::kSend, Fault::On::kReceive}) {
    for (int nth = 0;; ++nth) {
      Ended ended = run_until({8, 0}, {3, 5}, 1, failure_of_move(on, nth));
      if (!ended.failed) break;
      ++failures;
      const auto states = go_on(first_of(ended));
      ASSERT_TRUE(states) << nth << ": " << states.error().message;
      EXPECT_EQ(*states, alone()) << nth;
    }
  }
  EXPECT_GE(failures, 5 * 4);
}

// The group fails as rank 0 tells the others that its copies are whole, or a step later, when the
// new plan is in force. From then on rank 1 is not needed for them.
TEST(BackgroundMove, ARankThatIsLostAfterItGaveItsLayersIsNotMissed) {
  for (int nth = kMoveAt; nth < kMoveAt + 2; ++nth) {
    Ended ended =
        run_until({3, 5}, {8, 0}, 0, failure(Fault::On::kSend, kExchangeTag, kExchangeTag, nth));
    ASSERT_TRUE(ended.failed) << nth;
    const auto states = go_on(first_of(ended));
    ASSERT_TRUE(states) << nth << ": " << states.error().message;
    EXPECT_EQ(*states, alone()) << nth;
  }
}

// Every message of a move, damaged on its way: the old plan runs on, with no bit changed.
TEST(BackgroundMove, ADamagedMessageIsRefusedAndTheOldPlanRunsOn) {
  const RunResult still = run_pipeline({.steps = kSteps, .cut = {3, 5}});
  int refused = 0;
  for (int nth = 0;; ++nth) {
    std::vector<std::string> why(2);
    std::vector<plan::Plan> plans(2);
    const auto move = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
      const std::size_t rank = pipeline.grid().rank().index();
      if (step == kMoveAt) {
        DYNMO_TRY(pipeline.begin_move(plan::make_plan({5, 3}, pipeline.plan().schedule, 1)));
      }
      if (step == kMoveAt + 2) {
        why[rank] = pipeline.last_migration().refusal;
        plans[rank] = pipeline.plan();
      }
      return {};
    };
    Fault fault = failure_of_move(Fault::On::kSend, nth);
    fault.kind = Fault::Kind::kCorrupt;
    fault.byte = 17;
    const RunResult moving = run_pipeline({.steps = kSteps,
                                           .cut = {3, 5},
                                           .before_step = move,
                                           .faults = {fault},
                                           .faulty = transport::Member(1)});
    expect_same(still, moving, fmt::format("message {}", nth));
    if (plans[0].generation == 1) break;
    ++refused;
    EXPECT_EQ(plans[0], plans[1]) << nth;
    EXPECT_NE(why[0].find("from rank 1: "), std::string::npos) << why[0];
    EXPECT_NE(why[1].find("another rank has refused"), std::string::npos) << why[1];
    if (HasFailure()) return;
  }
  EXPECT_GE(refused, 2 * 4);
}

TEST(BackgroundMove, AStepThatIsSkippedOrStoppedLeavesBothEndsAlike) {
  for (const OnNan on_nan : {OnNan::kSkip, OnNan::kStop}) {
    RunOptions still{.steps = kSteps, .cut = {3, 5}, .on_nan = on_nan};
    const auto poison = [](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
      const auto found = pipeline.states().find(LayerId(7));
      if (found == pipeline.states().end()) return {};
      at::Tensor& value = found->second.parameters[0].value;  // a norm's weight, all ones at first
      if (step == kMoveAt) value.fill_(NAN);
      if (step == kMoveAt + 1) value.fill_(1);
      return {};
    };
    still.before_step = poison;
    RunOptions moving = still;
    moving.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
      DYNMO_TRY(poison(pipeline, step));
      if (step == kMoveAt) {
        DYNMO_TRY(pipeline.begin_move(plan::make_plan({5, 3}, pipeline.plan().schedule, 1)));
      }
      if (step == kMoveAt + 1) {
        EXPECT_NE(pipeline.coming_plan(), nullptr);
      }
      return {};
    };
    const RunResult as_still = run_pipeline(still);
    const RunResult as_moving = run_pipeline(moving);
    ASSERT_EQ(as_still.status.has_value(), on_nan == OnNan::kSkip);
    if (on_nan == OnNan::kStop) {
      EXPECT_EQ(as_moving.status.error().message, as_still.status.error().message);
    } else {
      EXPECT_EQ(as_moving.states, as_still.states);
    }
  }
}

// Layers move at once where a rank's memory does not hold them in addition to its own.
TEST(BackgroundMove, LayersMoveAtOnceWhereTheMemoryDoesNotHoldThemTwice) {
  for (const bool tight : {false, true}) {
    RunOptions run{.steps = 6, .cut = {3, 5}};
    bool during = false;
    run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
      if (step == 5) {
        DYNMO_TRY(pipeline.begin_move(plan::make_plan({5, 3}, pipeline.plan().schedule, 1)));
        if (pipeline.grid().rank() == WorldRank(0)) during = pipeline.plan().generation == 0;
      }
      return {};
    };
    if (tight) run.memory = Bytes{1};
    const RunResult result = run_pipeline(run);
    ASSERT_TRUE(result.status) << result.status.error().message;
    EXPECT_EQ(during, !tight);
  }
}

}  // namespace
}  // namespace dynmo::runtime::testing
