// SPDX-License-Identifier: Apache-2.0
// A group ends and another begins with the layers of the first.
#include <gtest/gtest.h>

#include <barrier>
#include <latch>
#include <thread>

#include "dynmo/dynamism/training/sources.h"
#include "tests/runtime/blinking_source.h"
#include "tests/runtime/generations.h"
#include "tests/runtime/resources.h"
#include "tests/support/process.h"

namespace dynmo::runtime::testing {
namespace {

using transport::Fault;
using transport::Transport;

struct Lives {
  std::vector<Expected<History>> histories = {};  // by member
  std::ptrdiff_t first_resources = 0;             // after the first turn of sizes
  std::ptrdiff_t last_resources = 0;
};

// Members as threads, which live as long as the training does.
Lives live_together(const Member& common) {
  Lives lives;
  lives.histories.resize(kMembers, Expected<History>(History()));
  std::vector<std::unique_ptr<Transport>> ends;
  const auto make_ends = [&](int group) {
    ends = transport::make_in_process_group(
        common.sizes[static_cast<std::size_t>(group) % common.sizes.size()]);
  };
  make_ends(0);
  std::barrier all_here(kMembers);
  const auto run = [&](int number) {
    Member member = common;
    member.number = number;
    member.join = [&, number](Generation, int) -> Expected<std::unique_ptr<Transport>> {
      std::unique_ptr<Transport> end = std::move(ends[static_cast<std::size_t>(number)]);
      if (end == nullptr) return make_error(ErrorCode::kPeerLost, "a member has failed");
      return end;
    };
    member.changed = [&, number](int group) {
      all_here.arrive_and_wait();
      if (number == 0) {
        if (group + 1 == std::ssize(common.sizes)) lives.first_resources = resources();
        if (group + 1 == common.groups) lives.last_resources = resources();
        make_ends(group + 1);
      }
      all_here.arrive_and_wait();
    };
    auto& history = lives.histories[static_cast<std::size_t>(number)];
    history = live(member);
    if (!history) all_here.arrive_and_drop();
  };
  {
    std::vector<std::jthread> threads;
    for (int number = 0; number < kMembers; ++number) threads.emplace_back(run, number);
  }
  return lives;
}

void expect_as_alone(const Member& common) {
  RunOptions run = common.run;
  run.steps = common.groups * common.steps_of_a_group;
  Member member = common;
  member.run = run;
  const Lives lives = live_together(member);
  const auto alone = live_alone(run.steps, run);
  ASSERT_TRUE(alone) << alone.error().message;
  for (const auto& history : lives.histories) {
    ASSERT_TRUE(history) << history.error().message;
  }
  EXPECT_EQ(lives.histories.front()->losses, alone->losses);
  EXPECT_EQ(lives.histories.front()->states, alone->states);
  EXPECT_EQ(std::ssize(alone->states), kLayers);
  EXPECT_EQ(lives.last_resources, lives.first_resources) << "left by " << common.groups;
}

TEST(Generation, FourTwoFourThreeRanksTwentyTimesChangeNoBit) {
  RunOptions run;
  run.micro_batches = 2;
  expect_as_alone({.groups = 80, .run = run});
}

TEST(Generation, AFrozenPrefixTravelsAlong) {
  RunOptions run;
  run.freezing = freezing();
  expect_as_alone({.groups = 16, .run = run});
}

// The rule's state travels along, too, to new ranks.
TEST(Generation, ARuleThatFollowsGradientsDecidesAlikeInEveryGroup) {
  RunOptions run;
  run.make_sources = freezing_by(norm_rule());
  expect_as_alone({.groups = 16, .run = run});
  EXPECT_NE(live_alone(32, run)->losses, live_alone(32, RunOptions())->losses) << "it freezes";
}

// With the references that outputs are compared with, in the layers' buffers.
TEST(Generation, ARuleThatFollowsOutputsDecidesAlikeInEveryGroup) {
  RunOptions run;
  run.make_sources = freezing_by(plasticity_rule());
  run.layers = shaped(model::make_llama(small_model()), run.make_sources);
  expect_as_alone({.groups = 16, .run = run});
  EXPECT_NE(live_alone(32, run)->losses, live_alone(32, RunOptions())->losses) << "it freezes";
}

// Masked, compressed and, from the front, frozen ones.
TEST(Generation, PrunedLayersTravelAlong) {
  RunOptions run;
  run.make_sources = [](std::int64_t) {
    dynamism::PruningOptions pruning;
    pruning.start = 1;
    pruning.end = 25;
    pruning.every = 8;
    dynamism::Sources sources;
    sources.push_back(dynamism::make_freezing_source({.schedule = freezing()}, /*steps=*/32));
    sources.push_back(dynamism::make_pruning_source(pruning));
    return sources;
  };
  expect_as_alone({.groups = 16, .run = run});
}

TEST(Generation, ReplicasShareOutWhatTheyHold) {
  RunOptions run;
  run.replicas = 2;
  expect_as_alone({.groups = 12, .sizes = {4, 2}, .run = run});
}

// Decisions go on from the costs of the group before; plans move while groups change.
TEST(Generation, RanksDecideAlikeAfterAChange) {
  RunOptions run;
  run.balancing = Balancing::kAutomatic;
  run.freezing = freezing();
  expect_as_alone({.groups = 8, .steps_of_a_group = 6, .run = run});
}

TEST(Generation, ProcessesChangeNoBitEither) {
  Process run(std::vector<std::string>{GENERATION_PROGRAM, "launch", "80"});
  EXPECT_EQ(run.wait(), 0) << run.output();
  EXPECT_NE(run.output().find("done\n"), std::string::npos) << run.output();
}

// Rank 1 never hears that rank 2 agrees. Rank 0 and rank 2 do, and give their layers away; then the
// group fails.
TEST(Generation, AVoteThatFailsAtOneRankLosesNoLayer) {
  const model::LlamaConfig config = small_model();
  const model::Model layers = model::make_llama(config);
  RunOptions run;
  run.steps = 6;
  const PipelineOptions options = pipeline_options(config, run);
  const auto batches = [&](std::int64_t step, MicroBatchId id) {
    return batch(config, run.seed, step, id);
  };
  const auto kind = schedule::ScheduleKind::k1F1B;
  const plan::Plan before = plan::make_plan({4, 2, 2}, kind);
  const plan::Plan wanted = plan::make_plan({2, 5, 1}, kind, 1);
  std::vector<RankState> states(3);
  std::vector<int> committed(3);
  std::latch two_have(2);
  const transport::Tag vote = transport::control_tag(transport::Control::kVote);
  const auto failed = transport::run_ranks(3, [&](Transport& inner) -> Expected<void> {
    at::set_num_threads(1);
    const std::size_t rank = inner.rank().index();
    const auto group =
        transport::with_faults(inner, rank == 2 ? std::vector<Fault>{{.kind = Fault::Kind::kDrop,
                                                                      .peer = transport::Member(1),
                                                                      .first_tag = vote,
                                                                      .last_tag = vote}}
                                                : std::vector<Fault>());
    Pipeline pipeline(
        *group, layers, options,
        {.plan = before,
         .layers = initial_states(layers, before, Rank(inner.rank().value), run.seed)});
    for (int i = 0; i < 3; ++i) DYNMO_TRY(pipeline.step(batches));
    const Expected<bool> moved = pipeline.apply(wanted);
    committed[rank] = moved.has_value() && *moved ? 1 : 0;
    states[rank] = pipeline.take_state();
    if (rank != 1) two_have.arrive_and_wait();
    if (rank == 2) inner.abort(make_error(ErrorCode::kPeerLost, "rank 2 was lost"));
    return moved ? Expected<void>() : moved.error();
  });
  EXPECT_FALSE(failed);
  EXPECT_EQ(committed, (std::vector{1, 0, 1}));

  // All of them begin again, under another plan.
  History history;
  const plan::Plan after = plan::make_plan({3, 2, 3}, kind, 2);
  const auto done = transport::run_ranks(3, [&](Transport& group) -> Expected<void> {
    at::set_num_threads(1);
    RankState& state = states[group.rank().index()];
    const transport::Grid grid(group, 1);
    DYNMO_TRY(regroup(grid, layers, after, state, run.staging));
    Pipeline pipeline(group, layers, options, std::move(state));
    for (int i = 3; i < run.steps; ++i) DYNMO_TRY(pipeline.step(batches));
    DYNMO_ASSIGN(auto all, gather_states(group, pipeline.states(), run.staging));
    if (group.rank() == transport::Member(0)) history.states = std::move(all);
    return {};
  });
  ASSERT_TRUE(done) << done.error().message;
  const auto alone = live_alone(run.steps, run);
  ASSERT_TRUE(alone) << alone.error().message;
  EXPECT_EQ(history.states, alone->states);
}

Holdings of_step(std::int64_t step, std::initializer_list<int> layers) {
  Holdings holdings;
  for (const int layer : layers) {
    holdings.layers.push_back({.copy = {.layer = LayerId(layer), .step = step}});
  }
  return holdings;
}

TEST(Generation, SourcesAreInTheReplicaAndShareTheWork) {
  const plan::Plan plan = plan::make_plan({1, 3}, schedule::ScheduleKind::k1F1B);
  const transport::Axes axes{.replicas = 2, .positions = 2};
  // Rank 3 is new; layers 1 to 3 are wanted there.
  const auto moves = choose_sources(
      {of_step(5, {0, 1, 2, 3}), of_step(5, {1, 2, 3}), of_step(5, {0, 2}), Holdings()}, 5, plan,
      axes);
  ASSERT_TRUE(moves) << moves.error().message;
  std::vector<std::array<int, 3>> found;
  for (const LayerTransfer& move : *moves) {
    found.push_back({move.layer.value, move.from.value, move.to.value});
  }
  EXPECT_EQ(found, (std::vector<std::array<int, 3>>{{1, 0, 3}, {2, 2, 3}, {3, 1, 3}}));
}

TEST(Generation, ALayerThatNobodyHasOrAnotherStepIsRefused) {
  const plan::Plan plan = plan::make_plan({1, 1}, schedule::ScheduleKind::k1F1B);
  const transport::Axes axes{.replicas = 1, .positions = 2};
  EXPECT_EQ(choose_sources({of_step(5, {0}), Holdings()}, 5, plan, axes).error().code,
            ErrorCode::kNoCheckpoint);
  EXPECT_EQ(choose_sources({of_step(5, {0}), of_step(6, {1})}, 5, plan, axes).error().code,
            ErrorCode::kNoCheckpoint);
  EXPECT_EQ(step_of({Holdings(), Holdings()}).error().code, ErrorCode::kNoCheckpoint);
  EXPECT_EQ(step_of({of_step(5, {0}), of_step(6, {1})}).error().code, ErrorCode::kInternal);
  EXPECT_EQ(step_of({Holdings(), of_step(6, {1})}).value(), 6);
}

TEST(Generation, HoldingsAreReadAsTheyWereWritten) {
  using elastic::CopyKind;
  const Holdings some{
      .frozen_layers = 1,
      .generation = 7,
      .asked = true,
      .product_fit = cost::ProductFit{.fixed = 1.0 / 3, .weights = 1.7, .segments = 0},
      .layers = {
          {{LayerId(0), 12, CopyKind::kLive}, {.frozen = true, .pruned = {}}},
          {{LayerId(0), 8, CopyKind::kNeighbour}, {}},
          {{LayerId(2), 12, CopyKind::kShadow}, {.frozen = false, .pruned = {{1, {9, true, 4}}}}},
          {{LayerId(3), 8, CopyKind::kOwn}, {}}}};
  for (const Holdings& holdings : {some, Holdings()}) {
    const auto read = parse_holdings(to_json(holdings));
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(*read, holdings);
  }
  const auto with = [](const char* layers) {
    return fmt::format(R"({{"frozen_layers":0,"generation":0,"asked":false,"layers":{}}})", layers);
  };
  const std::string live = R"({"layer":3,"step":1,"kind":"live","shape":"t"})";
  EXPECT_TRUE(parse_holdings(Json::parse(with("[]"))));
  EXPECT_TRUE(parse_holdings(Json::parse(with(("[" + live + "]").c_str()))));
  for (const std::string& text :
       {std::string("1"), std::string("{}"), with("1"), with("[3]"), with(R"([{"layer":3}])"),
        with(R"([{"layer":-1,"step":1,"kind":"live","shape":"t"}])"),
        with(R"([{"layer":3,"step":1,"kind":"live","shape":"q"}])"),
        with(R"([{"layer":3,"step":1,"kind":"dead","shape":"t"}])"),
        with(("[" + live + "," + live + "]").c_str()),
        with(R"([],"product_fit":{"fixed":1,"weights":1})"),
        with(R"([],"product_fit":{"fixed":-1,"weights":1,"segments":1})"),
        with(R"([],"product_fit":{"fixed":1,"weights":1,"segments":1,"cells":1})")}) {
    EXPECT_FALSE(parse_holdings(Json::parse(text))) << text;
  }
}

}  // namespace
}  // namespace dynmo::runtime::testing
