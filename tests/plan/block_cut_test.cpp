// SPDX-License-Identifier: Apache-2.0
// Plans of whole blocks against every cut there is, and against random ones.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "dynmo/cost/blocks.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/question/question.h"
#include "dynmo/schedule/generate.h"
#include "tests/plan/cuts.h"
#include "tests/support/samples.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

// Halves of blocks between an embedding and a head, as uneven as dynamic models are.
cost::ModelCost uneven_halves(Rng& rng, int blocks, int slices = 1) {
  cost::ModelCost model = random_model(rng, 2 * blocks + 1 + slices);
  auto layer = model.layers.begin();
  (layer++)->name = "embedding";
  for (int block = 0; block < blocks; ++block) {
    (layer++)->name = fmt::format("blocks.{}.attention", block);
    (layer++)->name = fmt::format("blocks.{}.mlp", block);
  }
  for (int slice = 0; slice < slices; ++slice) {
    (layer++)->name = slices == 1 ? "head" : fmt::format("head.{} of {}", slice, slices);
  }
  return model;
}

Question block_question(cost::ModelCost model, int ranks, int micro_batches) {
  Question question;
  question.model = std::move(model);
  question.cluster = cost::equal_ranks(ranks);
  question.cluster.inside_node.latency_s = 1e-5;
  question.micro_batches = micro_batches;
  EXPECT_TRUE(set_granularity(question, "block"));
  return question;
}

double step_time_s(const Question& question, const std::vector<int>& counts,
                   const std::vector<Rank>& placement, ScheduleKind kind) {
  const auto judged = evaluate(make_plan(counts, placement, question.cluster.size(), kind),
                               {question.model, question.cluster, question.micro_batches});
  return judged ? judged->step_time_s : std::numeric_limits<double>::infinity();
}

std::vector<Rank> placement_of(ScheduleKind kind, int ranks) {
  const auto layout = schedule::traits(kind).layout;
  if (layout == schedule::StageLayout::kV) return schedule::wave_placement(ranks, 2);
  return schedule::loop_placement(ranks, layout == schedule::StageLayout::kLoop ? 2 : 1);
}

TEST(BlockCut, EqualsBruteForceAtTwelveBlocks) {
  for (std::uint64_t seed = 0; seed < samples(12U); ++seed) {
    Rng rng(mix_key({0xB10C, seed}));
    const int ranks = pick(rng, 2, 5);
    Question question = block_question(uneven_halves(rng, 12), ranks, 2 * ranks);
    ASSERT_EQ(question.model.size(), 14);
    double best_of_all = std::numeric_limits<double>::infinity();
    for (const ScheduleKind kind : {ScheduleKind::kGpipe, ScheduleKind::k1F1B, ScheduleKind::kZbH1,
                                    ScheduleKind::kInterleaved}) {
      const std::vector<Rank> placement = placement_of(kind, ranks);
      if (placement.size() > 6) continue;  // too many cuts to replay them all here
      double best = std::numeric_limits<double>::infinity();
      for_each_cut(14, static_cast<int>(placement.size()), [&](const std::vector<int>& counts) {
        best = std::min(best, step_time_s(question, counts, placement, kind));
      });
      question.schedule = kind;
      const auto given = answer(question);
      ASSERT_TRUE(given) << given.error().message;
      EXPECT_LE(given->evaluation.step_time_s, best) << schedule::name(kind) << ", seed " << seed;
      if (kind != ScheduleKind::kInterleaved) {  // whose plans may have four stages a rank
        EXPECT_EQ(given->evaluation.step_time_s, best) << schedule::name(kind) << ", seed " << seed;
      }
      best_of_all = std::min(best_of_all, best);
    }
    question.schedule.reset();
    const auto given = answer(question);
    ASSERT_TRUE(given) << given.error().message;
    EXPECT_LE(given->evaluation.step_time_s, best_of_all) << "seed " << seed;
  }
}

TEST(BlockCut, IsNeverSlowerThanTheBestOfRandomCuts) {
  for (std::uint64_t seed = 0; seed < samples(15U); ++seed) {
    Rng rng(mix_key({0xB10D, seed}));
    const int ranks = pick(rng, 2, 8);
    const int blocks = pick(rng, 2 * ranks, 48);
    Question question = block_question(uneven_halves(rng, blocks), ranks, 2 * ranks);
    const int layers = question.model.size();
    for (const ScheduleKind kind : {ScheduleKind::k1F1B, ScheduleKind::kZbH1,
                                    ScheduleKind::kInterleaved, ScheduleKind::kZbV}) {
      const std::vector<Rank> placement = placement_of(kind, ranks);
      double best = std::numeric_limits<double>::infinity();
      for (int draw = 0; draw < 200; ++draw) {
        std::vector<int> ends;
        for (int layer = 1; layer < layers; ++layer) ends.push_back(layer);
        for (std::size_t i = 0; i + 1 < placement.size(); ++i) {
          std::swap(ends[i], ends[i + rng.below(ends.size() - i)]);
        }
        ends.resize(placement.size() - 1);
        std::ranges::sort(ends);
        ends.push_back(layers);
        std::vector<int> counts;
        int before = 0;
        for (const int end : ends) counts.push_back(end - std::exchange(before, end));
        best = std::min(best, step_time_s(question, counts, placement, kind));
      }
      question.schedule = kind;
      const auto given = answer(question);
      ASSERT_TRUE(given) << given.error().message;
      EXPECT_LE(given->evaluation.step_time_s, best)
          << schedule::name(kind) << ", " << blocks << " blocks on " << ranks << " ranks, seed "
          << seed;
    }
  }
}

TEST(BlockCut, SaysWhatJoiningTheSlicesOfTheHeadCosts) {
  Rng rng(mix_key({0xB10E, 1}));
  cost::ModelCost model = uneven_halves(rng, 4, 4);
  for (std::size_t i = model.layers.size() - 4; i < model.layers.size(); ++i) {
    model.layers[i].forward_s = 5e-3;  // longer than all blocks
  }
  Question question = block_question(model, 4, 8);
  question.balancer = Balancer::kOptimal;
  question.schedule = ScheduleKind::k1F1B;
  const auto given = answer(question);
  ASSERT_TRUE(given) << given.error().message;
  ASSERT_TRUE(given->joined_head);
  EXPECT_EQ(given->joined_head->slices, 4);
  EXPECT_GT(given->joined_head->step_time_s, 1.5 * given->joined_head->sliced_step_time_s);
  EXPECT_EQ(given->document["joined_head"]["slices"], 4);
  const auto again = parse_plan(given->document, "the plan");
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(*again, given->proposal.plan);
  EXPECT_FALSE(set_granularity(question, "quarter"));
}

}  // namespace
}  // namespace dynmo::plan
