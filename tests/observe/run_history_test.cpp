// SPDX-License-Identifier: Apache-2.0
// What a run's folder says of it is what the rank that led it folded as it happened.
#include "dynmo/observe/run_history.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>

#include "dynmo/core/files.h"
#include "dynmo/observe/event_log.h"
#include "dynmo/observe/load_trace_writer.h"
#include "dynmo/observe/run_summary.h"
#include "dynmo/observe/step_record.h"
#include "tests/support/full_disk.h"
#include "tests/support/temp_folder.h"

namespace dynmo::observe {
namespace {

constexpr std::int64_t kSteps = 60;

plan::Plan plan_on(int ranks) {
  plan::Plan plan = plan::make_plan(std::vector<int>(static_cast<std::size_t>(ranks), 2),
                                    schedule::ScheduleKind::k1F1B);
  return plan;
}

StepRecord record_of(std::int64_t step, int rank) {
  StepRecord record;
  record.step = step;
  record.rank = rank;
  record.tokens = 100;
  record.loss = step == 7 ? std::numeric_limits<double>::quiet_NaN()
                          : 3.0 / (1.0 + static_cast<double>(step));
  record.step_s = 0.1 + 1e-3 * static_cast<double>(step % 5);
  record.imbalance = 0.25;
  record.bubble = 1.0 / 3;
  record.moved_layers = step % 20 == 3 ? 2 : 0;
  record.moved_bytes = Bytes(step % 20 == 3 ? 100 : 0);
  record.sources = {{"pruning", {{"kept", 1.0 / static_cast<double>(step + 1)}}}};
  return record;
}

// A run's folder, as its ranks write it.
class RunHistoryOfAFolder : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_.records()); }

  void write(int rank, std::int64_t first, std::int64_t end, const std::string& torn = "") {
    std::ofstream file(folder_.records_of(WorldRank(rank)), std::ios::app);
    for (std::int64_t step = first; step < end; ++step) {
      file << record_json(record_of(step, rank)).dump() << '\n';
    }
    file << torn;
  }
  void note(const std::string& kind, std::int64_t step, const Json& more) {
    auto log = EventLog::open(folder_.events(), EventLog::Start::kAppend);
    ASSERT_TRUE(log);
    log->add(kind, step, more);
  }
  void start(int ranks) {
    note("start", 0, {{"ranks", ranks}, {"plan", plan::to_json(plan_on(ranks))}});
  }
  RunHistory read(std::int64_t steps = kSteps) {
    auto history = read_history(folder_, {.name = "run", .elastic = true}, steps);
    EXPECT_TRUE(history) << history.error().message;
    return history ? *std::move(history) : RunHistory();
  }
  // Folds all steps, as a rank does that leads from the first to the last.
  static RunHistory undisturbed() {
    RunHistory history({.name = "run", .elastic = true});
    for (std::int64_t step = 0; step < kSteps; ++step) {
      const StepRecord record = record_of(step, 0);
      history.add({static_cast<const StepFacts&>(record), step, 100},
                  RunHistory::ranks_of(plan_on(3), 1));
    }
    return history;
  }
  static void expect_same_steps(const RunHistory& one, const RunHistory& other) {
    EXPECT_EQ(one.count(), other.count());
    EXPECT_EQ(one.loss_digest(), other.loss_digest());
    EXPECT_EQ(one.seconds(), other.seconds());
    EXPECT_EQ(one.tokens_per_s(), other.tokens_per_s());
    EXPECT_EQ(one.moves(), other.moves());
    EXPECT_EQ(one.first_move(), other.first_move());
    EXPECT_EQ(one.over_steps(), other.over_steps());
    EXPECT_EQ(one.newest().back().step, other.newest().back().step);
  }

  TempFolder temp_;
  RunFolder folder_{temp_.path() / "run"};
};

TEST_F(RunHistoryOfAFolder, IsWhatTheRankThatLedHasFolded) {
  start(3);
  write(0, 0, kSteps);
  write(1, 0, kSteps);
  const RunHistory found = read();
  const RunHistory wanted = undisturbed();
  expect_same_steps(found, wanted);
  EXPECT_EQ(found.totals().working_s, wanted.totals().working_s);
  EXPECT_EQ(found.sources(), record_of(kSteps - 1, 0).sources);
  EXPECT_EQ(found.totals().members, 3);
}

// Eight losses, the leader's among them: each rank has the steps in which it was there.
TEST_F(RunHistoryOfAFolder, CoversTheWholeRunWhoeverLed) {
  start(3);
  std::int64_t begin = 0;
  for (int loss = 0; loss < 8; ++loss) {
    const std::int64_t end = begin + 7;
    // The lost rank was writing a line; the other goes back by two steps.
    write(loss, begin, end, R"({"format":"dynmo-step-1","ste)");
    write(loss + 1, begin, end);
    note("loss", end, {{"lost", {loss}}, {"why", "it was killed"}});
    note("recovery", end - 2,
         {{"ranks", {loss + 1, loss + 2}},
          {"from", "snapshot"},
          {"steps_again", 2},
          {"plan", plan::to_json(plan_on(2))}});
    begin = end - 2;
  }
  write(8, begin, kSteps);
  note("validation", kSteps, {{"loss", nullptr}});
  const RunHistory found = read();
  expect_same_steps(found, undisturbed());
  EXPECT_EQ(found.lost(), (std::set<int>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(found.totals().repeated_steps, 16);
  EXPECT_EQ(found.totals().members, 10);
  ASSERT_TRUE(found.validation());
  EXPECT_TRUE(std::isnan(found.validation()->loss));
  // Three ranks before the first recovery, which goes back to step 5, and two after it.
  EXPECT_GT(found.totals().saved_s, 0);
  EXPECT_NEAR(found.totals().working_s, 3 * 5 * 0.102 + 2 * (found.seconds() - 5 * 0.102), 1e-9);
}

TEST_F(RunHistoryOfAFolder, SaysWhichStepsHaveNoRecord) {
  start(3);
  write(0, 0, 20);
  write(0, 25, kSteps);
  EXPECT_EQ(read().count(), kSteps - 5);
  write(4, 18, 26);
  expect_same_steps(read(), undisturbed());
}

TEST(RunHistory, KeepsTheMostMemoryOfADevice) {
  RunHistory history({.name = "run"});
  for (const std::int64_t bytes : {3, 9, 5}) {
    StepFacts facts;
    facts.step_s = 1;
    facts.device_memory_bytes = Bytes{bytes};
    history.add({facts, history.count(), 100}, RunHistory::ranks_of(plan_on(2), 1));
  }
  EXPECT_EQ(history.over_steps().device_memory_bytes, Bytes{9});
}

TEST_F(RunHistoryOfAFolder, CountsWhatEventsTell) {
  start(2);
  note("saved", 10, {{"written", 1}, {"failed", 0}, {"pause_s", 0.25}});
  note("saved", 20, {{"written", 1}, {"failed", 1}, {"pause_s", 0.5}});
  note("size", 20, {{"ranks_before", {0, 1}}, {"ranks", {0, 1, 5}}, {"seconds", 0.5}});
  note("move", 20, {{"cause", "ranks have joined"}, {"layers", 3}, {"bytes", 70}, {"seconds", 2}});
  write(0, 0, kSteps);
  const RunHistory found = read();
  EXPECT_EQ(found.totals().checkpoints_written, 2);
  EXPECT_EQ(found.totals().checkpoints_failed, 1);
  EXPECT_EQ(found.over_steps().checkpoint_s, 0.75);
  EXPECT_EQ(found.totals().size_changes, 1);
  EXPECT_EQ(found.totals().changing_s, 1.0);
  EXPECT_EQ(found.totals().members, 6);
  EXPECT_EQ(found.moves(), undisturbed().moves() + 1);
  EXPECT_EQ(found.over_steps().moved_bytes, undisturbed().over_steps().moved_bytes + Bytes(70));
}

TEST_F(RunHistoryOfAFolder, HasTheErrorOfTheNewestTrace) {
  start(2);
  write(0, 0, kSteps);
  EXPECT_EQ(read().clock_error_s(), std::nullopt);
  note("clocks", 30, {{"error_s", 0.5}, {"ranks", Json::array()}});
  EXPECT_EQ(read().clock_error_s(), 0.5);
  start(2);  // resumed
  EXPECT_EQ(read().clock_error_s(), std::nullopt);
}

TEST_F(RunHistoryOfAFolder, NamesALineThatIsNoEventOfItsKind) {
  write(0, 0, kSteps);
  note("loss", 3, {{"lost", "all"}});
  const auto found = read_history(folder_, {}, kSteps);
  ASSERT_FALSE(found);
  EXPECT_NE(found.error().message.find("events.jsonl:1: "), std::string::npos)
      << found.error().message;
}

TEST_F(RunHistoryOfAFolder, ARankThatTakesOverReadsAllLossesAndTheNewestEvents) {
  for (int i = 0; i < 2000; ++i) {
    note(i % 100 == 0 ? "loss" : "checkpoint", i, {{"lost", {i}}, {"why", "a test of long lines"}});
  }
  const auto all = read_events(folder_.events());
  const auto some = read_events(folder_.events(), EventsOf::kTakeOver);
  ASSERT_TRUE(all && some);
  const auto is_loss = [](const Event& event) { return event.kind == "loss"; };
  EXPECT_EQ(std::ranges::count_if(*some, is_loss), 20);
  EXPECT_LT(some->size(), all->size());
  EXPECT_EQ(some->back().step, 1999);
}

// dynmo.torch does not measure a step with fewer micro-batches.
TEST(RunHistory, CountsAStepThatWasNotMeasuredWithoutItsTime) {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  RunHistory some({.name = "run"});
  RunHistory all({.name = "run"});
  for (std::int64_t step = 0; step < 12; ++step) {
    const bool short_step = step == 5 || step == 10;
    StepRecord record = record_of(step, 0);
    record.predicted_s = short_step ? 0 : 0.1;
    if (!short_step) all.add({static_cast<const StepFacts&>(record), step, 100}, {2, 2});
    if (short_step) record.step_s = record.busy_s = record.imbalance = record.bubble = kNone;
    some.add({static_cast<const StepFacts&>(record), step, 100}, {2, 2});
  }
  const RunSummary found = summarize(some, 2);
  const RunSummary wanted = summarize(all, 2);
  EXPECT_EQ(found.steps, wanted.steps + 2);
  EXPECT_EQ(found.seconds, wanted.seconds);
  EXPECT_EQ(found.tokens_per_s, wanted.tokens_per_s);
  EXPECT_EQ(found.step_time_s, wanted.step_time_s);
  EXPECT_EQ(found.imbalance, wanted.imbalance);
  EXPECT_EQ(found.bubble, wanted.bubble);
  EXPECT_EQ(found.predicted_steps, wanted.predicted_steps);
  EXPECT_EQ(found.prediction_error_worst, wanted.prediction_error_worst);
  EXPECT_NE(found.loss_digest, wanted.loss_digest);
  // The newest ten steps have eight that were measured.
  EXPECT_NEAR(found.end_tokens_per_s, 8 * 100 / 0.82, 1e-9);
  EXPECT_EQ(some.totals().working_s, all.totals().working_s);
}

// Fourteen steps of 1, 2, 3, .. s, two replicas of two ranks.
TEST(RunHistory, IsSummedUpByPlainSums) {
  RunHistory history({.name = "run", .replicas = 2});
  for (std::int64_t step = 0; step < 14; ++step) {
    StepFacts facts;
    facts.step_s = static_cast<double>(step + 1);
    facts.busy_s = facts.step_s / 4;
    facts.predicted_s = step < 3 ? 0 : facts.step_s + 0.5;
    facts.loss = 20.0 - static_cast<double>(step);
    facts.moved_layers = step == 2 ? 1 : 0;
    history.add({facts, step, 100}, {4, 4});
  }
  history.add_event("validation", 14, {{"loss", 3.25}, {"generation_loss", 3.5}});
  const RunSummary found = summarize(history, 2);
  EXPECT_EQ(found.ranks, 4);
  EXPECT_EQ(found.steps, 14);
  EXPECT_EQ(found.seconds, 105);
  EXPECT_EQ(found.step_time_s, 7.5);
  EXPECT_EQ(found.tokens_per_s, 1400.0 / 105);
  EXPECT_EQ(found.end_tokens_per_s, 1000.0 / 95);  // of the newest ten
  EXPECT_EQ(found.loss_first, 20);
  EXPECT_EQ(found.loss_last, 11.5);
  EXPECT_EQ(found.validation_step, 14);
  EXPECT_EQ(found.validation_loss, 3.25);
  EXPECT_EQ(found.generation_loss, 3.5);
  EXPECT_EQ(found.migrations, 1);
  EXPECT_EQ(found.predicted_steps, 11);
  EXPECT_EQ(found.prediction_error_median, 0.5 / 9);
  EXPECT_EQ(found.prediction_error_worst, 0.125);
}

cost::ModelCost costs_of(double seconds) {
  cost::ModelCost model{std::vector<cost::LayerCost>(2)};
  for (cost::LayerCost& layer : model.layers) {
    layer.name = "layer";
    layer.forward_s = seconds;
  }
  return model;
}

// Another rank goes on from step 6, where the one before had reached step 8.
TEST_F(RunHistoryOfAFolder, ALoadTraceGoesOnWithAnotherWriter) {
  const std::filesystem::path path = folder_.load_trace(0);
  dynamism::TraceLines lines;
  std::string text;
  for (std::int64_t step = 0; step <= 8; ++step) {
    const auto line =
        lines.add(step, cost::Announced::kNothing, costs_of(1e-3 * (1.0 + double(step))));
    ASSERT_TRUE(line);
    text += *line;
  }
  std::ofstream(path) << text << R"({"step":9,"forw)";
  const auto writer = LoadTraceWriter::go_on(path, 1, 6);
  ASSERT_TRUE(writer) << writer.error().message;
  const auto kept = read_file(path);
  ASSERT_TRUE(kept);
  EXPECT_TRUE(text.starts_with(*kept));
  const auto load = dynamism::parse_trace(*kept, "kept");
  ASSERT_TRUE(load) << load.error().message;
  EXPECT_EQ((*load)->recorded_steps().back(), 5);

  dynamism::TraceLines next;
  next.go_on(5);
  EXPECT_FALSE(next.add(5, cost::Announced::kNothing, costs_of(0.5)));
  const auto line = next.add(6, cost::Announced::kNothing, costs_of(0.5));
  ASSERT_TRUE(line);
  const auto whole = dynamism::parse_trace(*kept + *line, "whole");
  ASSERT_TRUE(whole) << whole.error().message;
  EXPECT_EQ((*whole)->at(5).layers[1].forward_s, 1e-3 * 6);
  EXPECT_EQ((*whole)->at(6).layers[1].forward_s, 0.5);
}

TEST_F(RunHistoryOfAFolder, ALoadTraceEndsWithTheStepThatDoesNotFit) {
  const std::filesystem::path path = folder_.load_trace(0);
  const auto writer = LoadTraceWriter::open(path, 1);
  ASSERT_TRUE(writer) << writer.error().message;
  const cost::LayerSample layer{.time = {.forward_s = 1e-3}, .stash_bytes = {}};
  const cost::Observation observed{.layers = {layer, layer}};
  control::Profiler profiler(costs_of(0), 1);
  profiler.add(observed.layers, {Rank(0), Rank(0)});
  const auto add = [&](std::int64_t step) {
    (*writer)->add({.step = step, .profiler = profiler, .observed = observed});
  };
  add(0);
  const auto whole = read_file(path);
  {
    const FullDisk full(std::filesystem::file_size(path) + 5);
    add(1);
  }
  add(2);
  const auto closed = (*writer)->close();
  ASSERT_FALSE(closed);
  EXPECT_EQ(closed.error().message, "cannot write '" + path.string() + "': File too large");
  const auto kept = read_file(path);
  ASSERT_TRUE(whole && kept);
  EXPECT_EQ(*kept, *whole);
  EXPECT_TRUE(whole->ends_with("\n"));
}

TEST_F(RunHistoryOfAFolder, LoadTracesAreFoundByTheirFirstStep) {
  for (const char* name : {"load-trace.jsonl", "load-trace-00000040.jsonl", "load-trace-x.jsonl",
                           "load-trace-7.jsonl", "events.jsonl"}) {
    std::ofstream(folder_.root() / name) << "\n";
  }
  const auto found = load_traces(folder_);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found.begin()->first, 0);
  EXPECT_EQ(found.rbegin()->second, folder_.load_trace(40));
}

}  // namespace
}  // namespace dynmo::observe
