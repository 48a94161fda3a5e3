// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/plan.h"

#include <gtest/gtest.h>

#include <array>

#include "dynmo/core/check.h"
#include "dynmo/plan/migration.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/lowering.h"
#include "tests/plan/cuts.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

// A cut in which ranks may be idle or hold several stages.
Plan random_plan(Rng& rng, int layers, int ranks) {
  Plan plan{.ranks = ranks,
            .stages = {},
            .schedule = ScheduleKind::k1F1B,
            .generation = static_cast<Generation>(rng.below(5))};
  for (int first = 0; first < layers;) {
    const int count = pick(rng, 1, layers - first);
    plan.stages.push_back({Rank{pick(rng, 0, ranks - 1)}, {LayerId{first}, count}});
    first += count;
  }
  return plan;
}

TEST(Plan, OwnersAndStagesFollowTheCut) {
  const Plan plan = make_plan({2, 0, 3}, ScheduleKind::k1F1B, 7);
  EXPECT_EQ(plan.ranks, 3);
  EXPECT_EQ(plan.layers(), 5);
  EXPECT_EQ(plan.owner(LayerId{1}), Rank{0});
  EXPECT_EQ(plan.owner(LayerId{2}), Rank{2});
  EXPECT_EQ(plan.stages_of(Rank{1}), (std::vector<int>{}));
  EXPECT_EQ(plan.stages_of(Rank{2}), (std::vector<int>{1}));
  EXPECT_EQ(to_string(plan), "2|3");
  EXPECT_TRUE(validate(plan, 5));
  EXPECT_THROW((void)plan.owner(LayerId{5}), CheckFailure);
}

TEST(Plan, OwnerAgreesWithTheStageThatContainsTheLayer) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({0x93A, seed}));
    const Plan plan = random_plan(rng, 17, 4);
    ASSERT_TRUE(validate(plan, 17)) << "seed " << seed;
    for (const PlanStage& stage : plan.stages) {
      for (std::int32_t i = 0; i < 17; ++i) {
        if (stage.layers.contains(LayerId{i})) {
          ASSERT_EQ(plan.owner(LayerId{i}), stage.rank) << "seed " << seed;
        }
      }
    }
  }
}

TEST(Plan, ValidationNamesTheFault) {
  const Plan good = make_plan({2, 3}, ScheduleKind::k1F1B);
  const auto message = [](const Plan& plan, int layers) {
    const auto valid = validate(plan, layers);
    EXPECT_FALSE(valid);
    return valid ? "" : valid.error().message;
  };
  EXPECT_EQ(message(good, 6), "the plan has 5 layers, wanted the model's 6");
  Plan bad = good;
  bad.stages[1].layers.first = LayerId{1};
  EXPECT_NE(message(bad, 5).find("stage 1 starts at layer 1, wanted 2"), std::string::npos);
  bad = good;
  bad.stages[1].rank = Rank{2};
  EXPECT_NE(message(bad, 5).find("stage 1 is on rank 2, wanted one below 2"), std::string::npos);
  bad = good;
  bad.stages[0].layers.count = 0;
  EXPECT_NE(message(bad, 5).find("stage 0 has 0 layers"), std::string::npos);
  bad.ranks = 0;
  EXPECT_NE(message(bad, 5).find("0 ranks"), std::string::npos);
}

TEST(Plan, TheDigestCoversEveryField) {
  const Plan plan = make_plan({2, 3}, ScheduleKind::k1F1B, 1);
  EXPECT_EQ(digest(plan), digest(make_plan({2, 3}, ScheduleKind::k1F1B, 1)));
  EXPECT_NE(digest(plan), digest(make_plan({3, 2}, ScheduleKind::k1F1B, 1)));
  EXPECT_NE(digest(plan), digest(make_plan({2, 3}, ScheduleKind::kGpipe, 1)));
  EXPECT_NE(digest(plan), digest(make_plan({2, 3}, ScheduleKind::k1F1B, 2)));
  EXPECT_NE(digest(plan), digest(make_plan({2, 3, 0}, ScheduleKind::k1F1B, 1)));
  Plan swapped = plan;
  std::swap(swapped.stages[0].rank, swapped.stages[1].rank);
  EXPECT_NE(digest(plan), digest(swapped));
}

TEST(Plan, ShapeMarksOnlyWhollyFrozenStages) {
  const auto shape = shape_of(make_plan({2, 2, 1}, ScheduleKind::k1F1B), 8, 3);
  EXPECT_EQ(shape.ranks, 3);
  EXPECT_EQ(shape.micro_batches, 8);
  ASSERT_EQ(shape.stages.size(), 3U);
  EXPECT_TRUE(shape.stages[0].frozen);
  EXPECT_FALSE(shape.stages[1].frozen);
  EXPECT_FALSE(shape.stages[2].frozen);
}

TEST(Migration, AppliedToTheOldPlanGivesTheNewOne) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    Rng rng(mix_key({0x316, seed}));
    const cost::ModelCost model = whole_number_model(rng, pick(rng, 1, 20));
    const Plan from = random_plan(rng, model.size(), 4);
    const Plan to = random_plan(rng, model.size(), 4);
    std::vector<Rank> owners;
    for (std::int32_t i = 0; i < model.size(); ++i) owners.push_back(from.owner(LayerId{i}));
    std::int32_t last = -1;
    std::int64_t bytes = 0;
    const Migration migration = difference(from, to, model);
    for (const LayerMove& move : migration.moves) {
      ASSERT_GT(move.layer.value, last) << "seed " << seed;  // ascending: one order on every rank
      ASSERT_EQ(owners[move.layer.index()], move.from) << "seed " << seed;
      ASSERT_NE(move.from, move.to) << "seed " << seed;
      owners[move.layer.index()] = move.to;
      last = move.layer.value;
      bytes += move.bytes.value;
    }
    for (std::int32_t i = 0; i < model.size(); ++i) {
      ASSERT_EQ(owners[static_cast<std::size_t>(i)], to.owner(LayerId{i})) << "seed " << seed;
    }
    ASSERT_EQ(migration.bytes().value, bytes);
  }
}

TEST(Migration, FrozenLayersMoveTheirParametersOnly) {
  cost::ModelCost model = equal_model(4, 1);
  model.layers[1].frozen = true;
  const Migration migration = difference(make_plan({1, 3}, ScheduleKind::k1F1B),
                                         make_plan({3, 1}, ScheduleKind::k1F1B), model);
  ASSERT_EQ(migration.moves.size(), 2U);
  EXPECT_EQ(migration.moves[0], (LayerMove{LayerId{1}, Rank{1}, Rank{0}, Bytes{1000}}));
  EXPECT_EQ(migration.moves[1], (LayerMove{LayerId{2}, Rank{1}, Rank{0}, Bytes{3000}}));
  EXPECT_EQ(migration.bytes(), Bytes{4000});
}

TEST(NamedCut, SaysTheEndsOfEveryStage) {
  const std::vector<std::string> names = {"embedding", "a", "b", "head"};
  const auto cut = [&](const std::vector<int>& counts) {
    return named_cut(make_plan(counts, schedule::ScheduleKind::k1F1B), names);
  };
  EXPECT_EQ(cut({4}), "embedding .. head");
  EXPECT_EQ(cut({2, 2}), "embedding .. a | b .. head");
  EXPECT_EQ(cut({1, 2, 1}), "embedding | a .. b | head");
}

TEST(NamedCut, OfManyStagesShowsTheOuterOnes) {
  std::vector<std::string> names;
  for (int i = 0; i < 10; ++i) names.push_back(fmt::format("{}", i));
  const auto plan = make_plan(std::vector<int>(10, 1), schedule::ScheduleKind::k1F1B);
  EXPECT_EQ(named_cut(plan, names), "0 | 1 | 2 | 3 | (2 more stages) | 6 | 7 | 8 | 9");
}

// An order that was made while layers were frozen, of any schedule, runs with fewer of them.
TEST(Plan, AnOrderThatWasMadeForFrozenStagesRunsWhenTheyTrainAgain) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    Rng rng(mix_key({0x7A3, seed}));
    const int ranks = pick(rng, 1, 5);
    const int micro_batches = ranks * pick(rng, 1, 3);
    const bool interleaved = pick(rng, 0, 2) == 0;
    const auto kind = interleaved ? ScheduleKind::kInterleaved
                                  : std::array{ScheduleKind::kGpipe, ScheduleKind::k1F1B,
                                               ScheduleKind::kZbH1}[rng.below(3)];
    const int stages = interleaved ? 2 * ranks : ranks;
    Plan plan{.ranks = ranks, .stages = {}, .schedule = kind};
    for (int s = 0; s < stages; ++s) {
      plan.stages.push_back({Rank{s % ranks}, {LayerId{2 * s}, 2}});
    }
    const int frozen = pick(rng, 0, 2 * stages - 1);
    plan.order = schedule_of(plan, micro_batches, frozen).value().ranks;
    plan.schedule = ScheduleKind::kAdaptive;
    for (int now = 0; now < 2 * stages; ++now) {
      const auto made = schedule_of(plan, micro_batches, now);
      ASSERT_TRUE(made) << "seed " << seed << ": " << made.error().message;
      const auto facts = schedule::check(schedule::lower(*made));
      ASSERT_TRUE(facts) << "seed " << seed << ", " << frozen << " frozen, then " << now << ": "
                         << facts.error().message;
      if (now == frozen) {
        EXPECT_EQ(made->ranks, plan.order) << "seed " << seed;
      }
    }
  }
}

}  // namespace
}  // namespace dynmo::plan
