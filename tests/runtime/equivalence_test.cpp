// SPDX-License-Identifier: Apache-2.0
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "dynmo/core/rng.h"
#include "dynmo/plan/migration.h"
#include "pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

class Equivalence : public ::testing::TestWithParam<std::tuple<int, schedule::ScheduleKind>> {};

TEST_P(Equivalence, AnyCutAndPlacementEqualsOneRankBitForBit) {
  const auto [ranks, kind] = GetParam();
  const int micro_batches = 2 * ranks;  // what interleaved takes
  const RunResult single = run_pipeline({.micro_batches = micro_batches, .cut = {kLayers}});
  ASSERT_TRUE(single.status.has_value()) << single.status.error().message;
  EXPECT_LT(single.losses.back(), single.losses.front() + 1);
  constexpr std::uint64_t kSeed = 11;
  Rng rng(mix_key({kSeed, static_cast<std::uint64_t>(ranks)}));
  for (int i = 0; i < 4; ++i) {
    const plan::Plan plan = random_plan(rng, kind, kLayers, ranks, micro_batches);
    const RunResult pipelined = run_pipeline({.micro_batches = micro_batches, .plan = plan});
    expect_same(
        single, pipelined,
        fmt::format("seed {}, {} cut {}", kSeed, schedule::name(kind), plan::to_string(plan)));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ranks, Equivalence, ::testing::Combine(::testing::Values(2, 3, 4), ::testing::ValuesIn(kKinds)),
    [](const auto& test) {
      std::string text =
          fmt::format("{}_{}", schedule::name(std::get<1>(test.param)), std::get<0>(test.param));
      std::replace(text.begin(), text.end(), '-', '_');
      return text;
    });

// Moves to a random other cut before every second step; at least one moved layer still has its
// moments.
struct RandomMoves {
  std::uint64_t seed = 23;
  int ranks = 3;
  int moves = 0;
  // Called on the receiving side after every move, for layers that moved.
  std::function<void(Pipeline&, LayerId)> tamper = {};

  Expected<void> operator()(Pipeline& pipeline, std::int64_t step) const {
    if (step % 2 != 0 || step == 0) return {};
    Rng rng(mix_key({seed, static_cast<std::uint64_t>(step)}));
    const plan::Plan before = pipeline.plan();
    const cost::ModelCost model{std::vector<cost::LayerCost>(kLayers)};
    while (true) {
      const plan::Plan plan =
          plan::make_plan(random_cut(rng, kLayers, ranks), before.schedule, before.generation + 1);
      const plan::Migration migration = plan::difference(before, plan, model);
      const bool with_moments = std::any_of(
          migration.moves.begin(), migration.moves.end(),
          [&](const auto& move) { return move.layer.value >= pipeline.frozen_layers(); });
      if (!with_moments) continue;
      DYNMO_ASSIGN(const bool moved, pipeline.apply(plan));
      EXPECT_TRUE(moved) << pipeline.last_migration().refusal;
      if (tamper) {
        for (const auto& move : migration.moves) {
          if (pipeline.states().contains(move.layer) &&
              move.layer.value >= pipeline.frozen_layers()) {
            tamper(pipeline, move.layer);
            break;
          }
        }
      }
      return {};
    }
  }
};

TEST(Migration, RandomMovesChangeNoBit) {
  const RunResult still = run_pipeline({.steps = 40, .cut = {3, 2, 3}, .freezing = freezing()});
  const RunResult moving = run_pipeline(
      {.steps = 40, .cut = {3, 2, 3}, .freezing = freezing(), .before_step = RandomMoves{}});
  expect_same(still, moving, "seed 23");
  for (const auto& [layer, owners] : moving.owners) EXPECT_EQ(owners, 1) << "layer " << layer;
}

// Schedule, placement and number of stages change with the cut.
TEST(Migration, RandomChangesOfScheduleAndPlacementChangeNoBit) {
  constexpr std::uint64_t kSeed = 29;
  constexpr int kRanks = 3;
  constexpr int kMicroBatches = 6;
  std::set<schedule::ScheduleKind> seen;
  std::mutex mutex;
  const auto see = [&](const Pipeline&, schedule::ScheduleKind kind) {
    const std::lock_guard lock(mutex);
    seen.insert(kind);
  };
  RunOptions options{.steps = 60, .micro_batches = kMicroBatches, .cut = {3, 2, 3}};
  options.freezing = freezing();
  const RunResult still = run_pipeline(options);
  options.before_step = random_plans(kSeed, kRanks, kMicroBatches, see);
  const RunResult moving = run_pipeline(options);
  expect_same(still, moving, fmt::format("seed {}", kSeed));
  EXPECT_EQ(seen.size(), kKinds.size());
}

// The tests above notice when any part of a layer's state stays behind.
TEST(Migration, AWithheldPartOfTheStateShows) {
  const RunResult still = run_pipeline({.steps = 40, .cut = {3, 2, 3}, .freezing = freezing()});
  const std::vector<std::pair<std::string, std::function<void(Pipeline&, LayerId)>>> withheld = {
      {"first moment",
       [](Pipeline& p, LayerId id) { p.states().at(id).parameters[0].first_moment.zero_(); }},
      {"second moment",
       [](Pipeline& p, LayerId id) { p.states().at(id).parameters[0].second_moment.zero_(); }},
      {"step count", [](Pipeline& p, LayerId id) { p.states().at(id).optimizer_steps = 0; }},
      {"random key", [](Pipeline& p, LayerId id) { p.states().at(id).random_key = 0; }},
      {"value", [](Pipeline& p, LayerId id) { p.states().at(id).parameters[0].value.zero_(); }},
  };
  for (const auto& [part, tamper] : withheld) {
    const RunResult moving = run_pipeline({.steps = 40,
                                           .cut = {3, 2, 3},
                                           .freezing = freezing(),
                                           .before_step = RandomMoves{.tamper = tamper}});
    ASSERT_TRUE(moving.status.has_value()) << moving.status.error().message;
    EXPECT_NE(still.states, moving.states) << part;
  }
}

TEST(Migration, ACorruptedCopyIsRefusedAndTheOldPlanRunsOn) {
  const RunResult still = run_pipeline({.cut = {4, 4}});
  bool refused = false;
  const auto move = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step != 5) return {};
    DYNMO_ASSIGN(const bool moved,
                 pipeline.apply(plan::make_plan({2, 6}, pipeline.plan().schedule, 1)));
    refused = !moved;
    EXPECT_NE(pipeline.last_migration().refusal.find("checksum"), std::string::npos)
        << pipeline.last_migration().refusal;
    return {};
  };
  const transport::Fault fault{.kind = transport::Fault::Kind::kCorrupt,
                               .first_tag = transport::migration_tag(LayerId(0)),
                               .last_tag = transport::migration_tag(LayerId(kLayers)),
                               .first = 2,
                               .byte = 17};
  const RunResult moving = run_pipeline({.cut = {4, 4}, .before_step = move, .faults = {fault}});
  EXPECT_TRUE(refused);
  expect_same(still, moving, "a flipped bit in a migrating layer");
}

TEST(Migration, APlanThatNoScheduleCanRunIsRefusedBeforeAnythingMoves) {
  const RunResult still = run_pipeline({.cut = {4, 4}});
  const auto move = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step != 5) return {};
    const auto moved = pipeline.apply(plan::make_plan({2, 2, 4}, {Rank(0), Rank(1), Rank(0)}, 2,
                                                      schedule::ScheduleKind::k1F1B, 1));
    EXPECT_FALSE(moved.has_value());
    if (moved.has_value()) return {};
    EXPECT_EQ(moved.error().code, ErrorCode::kBadInput);
    return {};
  };
  expect_same(still, run_pipeline({.cut = {4, 4}, .before_step = move}), "a refused plan");
}

TEST(Migration, ALostMessageEndsEveryRankWithPeerLost) {
  const auto move = [](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step != 2) return {};
    DYNMO_TRY(pipeline.apply(plan::make_plan({2, 6}, pipeline.plan().schedule, 1)));
    return {};
  };
  const transport::Fault fault{.kind = transport::Fault::Kind::kFail,
                               .first_tag = transport::migration_tag(LayerId(0)),
                               .last_tag = transport::migration_tag(LayerId(kLayers)),
                               .first = 1};
  const RunResult moving = run_pipeline({.cut = {4, 4}, .before_step = move, .faults = {fault}});
  ASSERT_FALSE(moving.status.has_value());
  EXPECT_EQ(moving.status.error().code, ErrorCode::kPeerLost);
}

TEST(Freezing, FreesGradientsAndMomentsAndKeepsTheValues) {
  std::map<int, std::string> before;
  std::mutex mutex;
  const auto look = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    const std::lock_guard lock(mutex);
    for (const auto& [id, state] : pipeline.states()) {
      if (id.value >= pipeline.frozen_layers()) continue;
      EXPECT_TRUE(state.frozen);
      Digester digester;
      for (const auto& parameter : state.parameters) {
        EXPECT_FALSE(parameter.gradient.defined() || parameter.first_moment.defined() ||
                     parameter.second_moment.defined());
        digester.update(std::span(static_cast<const std::byte*>(parameter.value.data_ptr()),
                                  parameter.value.nbytes()));
      }
      const std::string now = digester.digest().hex();
      const auto [seen, fresh] = before.try_emplace(id.value, now);
      EXPECT_EQ(seen->second, now) << "layer " << id.value << " at step " << step;
    }
    return {};
  };
  const RunResult result =
      run_pipeline({.cut = {3, 3, 2}, .freezing = freezing(), .before_step = look});
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
  EXPECT_GE(before.size(), 3U);
}

// Layer 3 holds no numbers during step 4.
Expected<void> poison(Pipeline& pipeline, std::int64_t step) {
  const auto found = pipeline.states().find(LayerId(3));
  if (found == pipeline.states().end()) return {};
  at::Tensor& value = found->second.parameters[0].value;  // a norm's weight, all ones at first
  if (step == 4) value.fill_(NAN);
  if (step == 5) value.fill_(1);
  return {};
}

TEST(OnNan, StopsNamingStepLayerAndRank) {
  const RunResult result = run_pipeline({.cut = {3, 2, 3}, .before_step = poison});
  ASSERT_FALSE(result.status.has_value());
  EXPECT_EQ(result.losses.size(), 4U);
  const std::string& message = result.status.error().message;
  EXPECT_NE(message.find("step 4: loss is nan"), std::string::npos) << message;
  EXPECT_NE(message.find("on rank "), std::string::npos) << message;
}

TEST(OnNan, NamesTheRanksOfTheWholeGroup) {
  const RunResult result = run_pipeline({.replicas = 2, .cut = {3, 5}, .before_step = poison});
  ASSERT_FALSE(result.status.has_value());
  const std::string& message = result.status.error().message;
  EXPECT_NE(message.find("on ranks 0, 2:"), std::string::npos) << message;
}

TEST(OnNan, SkipsTheUpdateOfThatStepAlone) {
  RunOptions options{.steps = 8, .cut = {3, 2, 3}};
  options.on_nan = OnNan::kSkip;
  std::map<int, std::int64_t> updates;
  std::mutex mutex;
  options.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    const std::lock_guard lock(mutex);
    if (step == 7) {
      for (const auto& [id, state] : pipeline.states()) updates[id.value] = state.optimizer_steps;
    }
    return poison(pipeline, step);
  };
  const RunResult result = run_pipeline(options);
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
  ASSERT_EQ(result.losses.size(), 8U);
  EXPECT_TRUE(std::isnan(result.losses[4]));
  EXPECT_TRUE(std::isfinite(result.losses[7]));
  ASSERT_EQ(updates.size(), static_cast<std::size_t>(kLayers));
  for (const auto& [layer, count] : updates) EXPECT_EQ(count, 6) << "layer " << layer;
}

TEST(Balancing, MovesLayersByItselfAndChangesNoBit) {
  const RunResult still = run_pipeline({.steps = 40, .cut = {2, 2, 4}, .freezing = freezing()});
  const RunResult balanced = run_pipeline(
      {.steps = 40, .cut = {2, 2, 4}, .freezing = freezing(), .balancing = Balancing::kAutomatic});
  expect_same(still, balanced, "automatic balancing");
}

}  // namespace
}  // namespace dynmo::runtime::testing
