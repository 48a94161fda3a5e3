// SPDX-License-Identifier: Apache-2.0
// A training on the strict device whose group grows, shrinks and loses a rank: the bits of one rank
// on the device, and the CPU's losses within a tolerance. So regrouping and snapshots are verified
// without a GPU.
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/runtime/regroup.h"
#include "dynmo/runtime/snapshot.h"
#include "tests/runtime/generations.h"
#include "tests/strict/like_cpu.h"
#include "tests/support/strict_device/strict_device.h"

namespace dynmo::runtime::testing {
namespace {

struct ChangingCell {
  const char* name;
  cost::Precision precision;
  bool freezes;
};

// One group of the training.
struct NextGroup {
  int ranks = 1;
  std::int64_t until = 0;                           // first step of the next one
  int keep = 0;                                     // ranks that hold layers at its end
  std::optional<std::int64_t> back_to = {};         // step to which it returns after a loss
  std::optional<std::int64_t> takes_snapshot = {};  // before this step
};

class ChangingTraining {
 public:
  explicit ChangingTraining(const RunOptions& run)
      : run_(run), layers_(layers_of(run)), options_(pipeline_options(small_model(), run)) {}

  // Trains in the next group. `lost` is the rank of the group before that is not there any more.
  Expected<void> go_on(const NextGroup& next, std::optional<int> lost = {}) {
    before_ = static_cast<int>(states_.size());
    if (lost) states_.erase(states_.begin() + *lost);
    states_.resize(static_cast<std::size_t>(next.ranks));
    generation_ += 100;
    digests.clear();
    return transport::run_ranks(
        next.ranks, [&](transport::Transport& group) { return train_in_group(group, next, lost); });
  }

  std::vector<double> losses;          // by step
  std::map<int, std::string> digests;  // of the layers at the end of the newest group

 private:
  Expected<void> train_in_group(transport::Transport& group, const NextGroup& next,
                                std::optional<int> lost) {
    at::set_num_threads(1);
    RankState& state = states_[group.rank().index()];
    DYNMO_TRY(begin(group, next, lost, state));
    Pipeline pipeline(group, layers_, options_, std::move(state));
    if (pipeline.costs()) DYNMO_TRY(pipeline.go_on());
    while (pipeline.next_step() < next.until) {
      if (pipeline.next_step() == next.takes_snapshot) {
        DYNMO_ASSIGN(const MigrationReport report, pipeline.take_snapshot(keepers(std::vector<int>(
                                                       static_cast<std::size_t>(next.ranks), 0))));
        EXPECT_TRUE(report.committed) << report.refusal;
      }
      DYNMO_ASSIGN(const StepReport report, pipeline.step([&](std::int64_t step, MicroBatchId id) {
        return batch(small_model(), run_.seed, step, id);
      }));
      if (group.rank() != transport::Member(0)) continue;
      losses.resize(static_cast<std::size_t>(report.step) + 1);
      losses.back() = report.loss;
    }
    if (next.keep < next.ranks) {
      std::vector<int> packed = uneven_cut(next.keep, pipeline.plan().generation + 1);
      packed.resize(static_cast<std::size_t>(next.ranks), 0);
      DYNMO_ASSIGN(const bool moved,
                   pipeline.apply(plan::make_plan(packed, schedule::ScheduleKind::k1F1B,
                                                  pipeline.plan().generation + 1)));
      EXPECT_TRUE(moved);
    }
    for (const auto& [id, layer] : pipeline.states()) {
      EXPECT_EQ(layer.parameters.front().value.device(), run_.staging.device);
      const std::string digest = model::digest(run_.staging.to_host(layer)).hex();
      const std::lock_guard lock(mutex_);
      digests[id.value] = digest;
    }
    state = pipeline.take_state();
    return {};
  }

  Expected<void> begin(transport::Transport& group, const NextGroup& next, std::optional<int> lost,
                       RankState& state) {
    const transport::Grid grid(group, 1);
    const plan::Plan plan = plan::make_plan(uneven_cut(next.ranks, generation_),
                                            schedule::ScheduleKind::k1F1B, generation_);
    if (generation_ == 100) {
      state = {.plan = plan, .layers = initial_states(layers_, plan, grid.position(), run_.seed)};
      return {};
    }
    if (next.back_to) roll_back(state, *next.back_to);
    if (state.controller) {
      std::vector<std::optional<Rank>> before;
      for (int i = 0; i < next.ranks; ++i) {
        const int old = lost && i >= *lost ? i + 1 : i;
        before.push_back(old < before_ ? std::optional(Rank(old)) : std::nullopt);
      }
      state.controller->ranks_changed(before);
    }
    return next.back_to ? regroup_at(*next.back_to, grid, layers_, plan, state, run_.staging)
                        : regroup(grid, layers_, plan, state, run_.staging);
  }

  RunOptions run_;
  model::Model layers_;
  PipelineOptions options_;
  std::deque<RankState> states_;  // by rank
  int before_ = 0;                // ranks of the group before
  Generation generation_ = 0;
  std::mutex mutex_;
};

class ChangingGroups : public ::testing::TestWithParam<ChangingCell> {};

TEST_P(ChangingGroups, KeepTheBitsOfOneRankAndTheLossesOfTheCpu) {
  const ChangingCell& cell = GetParam();
  RunOptions run{.steps = 20, .cut = {kLayers}};
  run.precision = cell.precision;
  if (cell.freezes) run.freezing = freezing();
  run.staging.device = at::kCPU;
  const RunResult cpu = run_pipeline(run);
  ASSERT_TRUE(cpu.status) << cpu.status.error().message;
  run.staging.device = strict::open(0);
  const RunResult alone = run_pipeline(run);
  ASSERT_TRUE(alone.status) << alone.status.error().message;
  dynmo::testing::expect_like_cpu(alone.losses, cpu.losses, cell.precision);

  ChangingTraining changing(run);
  const std::vector<NextGroup> groups = {
      {.ranks = 4, .until = 4, .keep = 2},
      {.ranks = 2, .until = 8, .keep = 2},
      {.ranks = 3, .until = 13, .keep = 3, .takes_snapshot = 11}};
  for (const NextGroup& next : groups) {
    const auto done = changing.go_on(next);
    ASSERT_TRUE(done) << next.until << ": " << done.error().message;
  }
  // Rank 1 is lost with its layers. The others return to step 11, for which rank 2 has a copy.
  const auto done = changing.go_on({.ranks = 2, .until = 20, .keep = 2, .back_to = 11}, 1);
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(changing.losses, alone.losses);
  EXPECT_EQ(changing.digests, alone.states);
}

INSTANTIATE_TEST_SUITE_P(
    On, ChangingGroups,
    ::testing::Values(ChangingCell{"dense_fp32", cost::Precision::kFp32, false},
                      ChangingCell{"freezing_bf16", cost::Precision::kBf16, true}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace dynmo::runtime::testing
