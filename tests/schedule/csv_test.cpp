// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/csv.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <optional>

#include "dynmo/core/files.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/schedule/text.h"
#include "dynmo/sim/simulate.h"
#include "tests/schedule/brute_force.h"
#include "tests/schedule/random_pipelines.h"
#include "tests/support/mutate.h"

namespace dynmo::schedule {
namespace {

using testing::pick;

std::string refusal(std::string_view text) {
  const Expected<CsvSchedule> read = read_csv(text, "x.csv");
  return read ? "read" : read.error().message;
}

// A schedule that a PyTorch 2.11 wrote (tests/schedule/pytorch_csv.py): 4 ranks, 8 micro-batches.
std::string golden(const std::string& name) {
  return *read_file(std::filesystem::path(DYNMO_SCHEDULE_DATA) / (name + ".csv"));
}

CsvSchedule read_golden(const std::string& name) {
  const Expected<CsvSchedule> read = read_csv(golden(name), name);
  EXPECT_TRUE(read) << read.error().message;
  return *read;
}

Schedule lowered(const Schedule& schedule) { return schedule.lowered ? schedule : lower(schedule); }

// Step time in units of F = I = W of a stage, messages free; none where the checker refuses it.
std::optional<double> replayed(const Schedule& schedule) {
  constexpr std::int64_t kUnit = 1000;
  const sim::StageCost unit{.forward = Nanoseconds{kUnit},
                            .input_gradient = Nanoseconds{kUnit},
                            .weight_gradient = Nanoseconds{kUnit},
                            .update = {},
                            .state = {},
                            .activation = Bytes{1},
                            .boundary = {}};
  const std::vector<sim::StageCost> costs(schedule.shape.stages.size(), unit);
  const cost::Cluster cluster{
      .ranks = std::vector<cost::ClusterRank>(static_cast<std::size_t>(schedule.shape.ranks)),
      .inside_node = {},
      .between_nodes = {}};
  const auto result = sim::simulate(lowered(schedule), costs, cluster);
  if (!result) return std::nullopt;
  return static_cast<double>(result->step_time.count()) / kUnit;
}

TEST(Csv, ReadsRowsAsRanksAndTheRankOfAStageFromItsForward) {
  const CsvSchedule read =
      *read_csv("0F0, 0F1,,(2F0;2B0)OVERLAP_F_B,0REDUCE_GRAD\r\n\n1UNSHARD,1F0,,1I0,1W0", "x.csv");
  EXPECT_EQ(read.ignored, 2);
  EXPECT_FALSE(read.schedule.lowered);
  EXPECT_EQ(
      read.schedule.shape,
      (PipelineShape{
          .ranks = 3,
          .micro_batches = 2,
          .stages = {{.rank = Rank{0}, .frozen = true}, {.rank = Rank{2}}, {.rank = Rank{0}}}}));
  EXPECT_EQ(to_grid(read.schedule),
            "rank 0 | 0F0 0F1 2F0 2B0\n"
            "rank 1 | idle\n"
            "rank 2 | 1F0 1I0 1W0\n");
}

TEST(Csv, SaysRowAndColumnOfWhatIsNoAction) {
  EXPECT_EQ(refusal("0F0,0B0\n1F0, ,1X0\n"),
            "x.csv: row 2, column 3: action '1X0' has the unknown kind 'X', known are "
            "F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B");
  EXPECT_EQ(
      refusal("0F0,\"0B0\""),
      "x.csv: row 1, column 2: '\"0B0\"' is not an action; want stage, kind, micro-batch such "
      "as 2F0 or 1SEND_F0");
  EXPECT_EQ(refusal("(0F0;0B0)TOGETHER"),
            "x.csv: row 1, column 1: '(0F0;0B0)TOGETHER' is not an action; want overlapped ones as "
            "(1F0;2B1)OVERLAP_F_B");
  EXPECT_EQ(refusal("0F0,0F0" + std::string(50, '0') + "\x01"),
            "x.csv: row 1, column 2: '0F0" + std::string(37, '0') +
                "...' is not an action; want stage, kind, micro-batch such as 2F0 or 1SEND_F0");
}

TEST(Csv, SaysWhatIsNoPipeline) {
  EXPECT_EQ(refusal(""), "x.csv: a pipeline of 0 ranks; want at least 1");
  EXPECT_EQ(refusal(",,\n"), "x.csv: 0 micro-batches; want at least 1");
  EXPECT_EQ(refusal("0F0,0B0\n0F0"), "x.csv: stage 0 runs F in rows 1 and 2; want one row a stage");
  EXPECT_EQ(refusal("0F0,2F0"),
            "x.csv: stage 1 has no F, which would say its rank; want one for each of 3 stages");
  EXPECT_EQ(
      refusal("0F0,2147483647F2147483647"),
      "x.csv: stages up to 2147483647 and micro-batches up to 2147483647, but only 2 actions; "
      "want an F for each pair");
}

TEST(Csv, ReadsBackWhatItWrites) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Rng rng(mix_key({31, seed}));
    const bool crowded = pick(rng, 0, 1) == 0;
    const ScheduleKind kind = testing::kTemplates[rng.below(testing::kTemplates.size())];
    const auto [shape, options] =
        crowded ? testing::Pipeline{.shape = testing::random_crowded_shape(rng)}
                : testing::random_pipeline(rng, kind);
    Schedule schedule =
        crowded ? testing::random_schedule(rng, shape) : *make_schedule(kind, shape, options);
    if (pick(rng, 0, 1) == 0) schedule = lower(schedule);
    const Expected<CsvSchedule> read = read_csv(write_csv(schedule), "written");
    ASSERT_TRUE(read) << "seed " << seed << ": " << read.error().message;
    // Without any message, a lowered schedule looks like one that is not.
    schedule.lowered = read->schedule.lowered;
    EXPECT_EQ(read->schedule, schedule) << "seed " << seed << "\n" << to_grid(schedule);
  }
}

// Whatever is read can be lowered, checked and explained.
TEST(Csv, TakesDamagedText) {
  int read = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    Rng rng(mix_key({32, seed}));
    const std::string text = mutate(golden(seed % 2 == 0 ? "1f1b" : "dual_pipe_v_comms"), rng);
    const Expected<CsvSchedule> damaged = read_csv(text, "damaged");
    if (!damaged) {
      EXPECT_EQ(damaged.error().message.find_first_of("\r\n"), std::string::npos)
          << "seed " << seed;
      continue;
    }
    ++read;
    const Schedule schedule = lowered(damaged->schedule);
    EXPECT_EQ(explain(schedule).empty(), testing::brute_force_accepts(schedule)) << "seed " << seed;
  }
  EXPECT_GT(read, 100);
}

// Their compute-only file and their lowering of it give the same order, and theirs replays in the
// time that our lowering takes. T of the first three is the closed form of docs/schedules.md.
TEST(PyTorchCsv, ReplaysWhatPyTorchWrites) {
  EXPECT_EQ(replayed(read_golden("gpipe").schedule), 3 * (8 + 4 - 1));
  EXPECT_EQ(replayed(read_golden("interleaved").schedule), 3 * (2 * 8 + 4 - 1));
  EXPECT_EQ(replayed(read_golden("zb_v").schedule), 6 * 8 + 4 - 1);
  EXPECT_TRUE(replayed(read_golden("interleaved_zb").schedule));
  for (const std::string name : {"interleaved", "interleaved_zb", "zb_v", "dual_pipe_v"}) {
    const CsvSchedule compute = read_golden(name);
    const CsvSchedule theirs = read_golden(name + "_comms");
    EXPECT_EQ(compute.ignored, 0) << name;
    EXPECT_GT(theirs.ignored, 0) << name;
    EXPECT_TRUE(theirs.schedule.lowered) << name;
    EXPECT_EQ(explain(theirs.schedule), "") << name;
    EXPECT_TRUE(testing::brute_force_accepts(theirs.schedule)) << name;
    Schedule order = theirs.schedule;
    order.lowered = false;
    for (auto& list : order.ranks) {
      std::erase_if(list, [](const Action& action) { return !is_compute(action.kind); });
    }
    EXPECT_EQ(order, compute.schedule) << name;
    if (name == "dual_pipe_v") continue;
    EXPECT_EQ(replayed(theirs.schedule), replayed(compute.schedule)) << name;
  }
  // They send both values of an overlapped pair after the second action, we each at once.
  EXPECT_EQ(replayed(read_golden("dual_pipe_v").schedule), 51);
  EXPECT_EQ(replayed(read_golden("dual_pipe_v_comms").schedule), 54);
}

TEST(PyTorchCsv, HasTheOrdersOfOurGenerators) {
  const auto loop = [](ScheduleKind kind, const char* name) {
    const PipelineShape shape = read_golden(name).schedule.shape;
    return make_schedule(kind, shape)->ranks;
  };
  EXPECT_EQ(read_golden("gpipe").schedule.ranks, loop(ScheduleKind::kGpipe, "gpipe"));
  EXPECT_EQ(read_golden("interleaved").schedule.ranks,
            loop(ScheduleKind::kInterleaved, "interleaved"));
  EXPECT_EQ(read_golden("zb_v").schedule.ranks, loop(ScheduleKind::kZbV, "zb_v"));
}

// The order that its Schedule1F1B gives of itself starts the last rank with micro-batch 1, and ends
// it with one that does not exist; what it runs is another, right order.
TEST(PyTorchCsv, IsReadButRefusedForTheLastRankOf1F1B) {
  const CsvSchedule read = read_golden("1f1b");
  EXPECT_EQ(read.schedule.shape.micro_batches, 9);
  EXPECT_EQ(to_grid(read.schedule,
                    {.marked = std::vector<Position>{{Rank{3}, 0}, {Rank{3}, 14}}, .context = 0}),
            "rank 0 | ...\n"
            "rank 1 | ...\n"
            "rank 2 | ...\n"
            "rank 3 | >3F1< ... >3F8< ...\n");
  EXPECT_EQ(check(lower(read.schedule)).error().message, "rank 0 has no 0F8; want it exactly once");
  // The other ranks are right.
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(read.schedule.ranks[r],
              make_schedule(ScheduleKind::k1F1B, testing::even_shape(4, 8))->ranks[r]);
  }
}

}  // namespace
}  // namespace dynmo::schedule
