// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/run_report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "dynmo/cost/files.h"
#include "dynmo/observe/step_record.h"
#include "tests/support/temp_folder.h"

namespace dynmo::observe {
namespace {

RunSummary run_summary(const std::string& name) {
  RunSummary run;
  run.name = name;
  run.tokens_per_s = 1234;
  run.loss_first = 5;
  run.loss_last = 3;
  run.loss_digest = "0123456789abcdef";
  run.ranks = 2;
  run.steps = 10;
  run.seconds = 2;
  run.migrations = 1;
  run.moved_layers = 3;
  run.plan_s = 0.02;
  run.update_s = 0.05;
  run.predicted_steps = 9;
  run.prediction_error_median = 0.041;
  run.prediction_error_worst = 0.3;
  return run;
}

Summary one_run() {
  Summary summary;
  summary.runs = {run_summary("run")};
  return summary;
}

cost::ModelCost two_layers() {
  cost::ModelCost model;
  model.layers.push_back({.name = "embed",
                          .forward_s = 1e-3,
                          .backward_input_s = 0,
                          .backward_weight_s = 2e-3,
                          .update_s = 3e-3,
                          .parameter_bytes = Bytes{1024},
                          .gradient_bytes = Bytes{1024},
                          .optimizer_bytes = Bytes{2048},
                          .copy_bytes = Bytes{},
                          .activation_bytes = Bytes{512},
                          .boundary_bytes = Bytes{100},
                          .frozen = true});
  model.layers.push_back(model.layers[0]);
  model.layers[1].name = "head";
  model.layers[1].frozen = false;
  return model;
}

// The words of the line of `text` that begins with `first`.
std::vector<std::string> words_of(const std::string& text, const std::string& first) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::vector<std::string> found{std::istream_iterator<std::string>(words), {}};
    if (!found.empty() && found.front() == first) return found;
  }
  return {};
}

TEST(RunReport, SaysSpeedPredictionAndOverheadOfAnyRun) {
  const Summary summary = one_run();
  const RunCurves curves{{0.1, 0.2}, {0.3, 0.2}};
  const auto lines = report_lines(summary, std::span(&curves, 1), "runs/a");
  const auto has = [&](const std::string& wanted) {
    return std::any_of(lines.begin(), lines.end(), [&](const std::string& line) {
      return line.find(wanted) != std::string::npos;
    });
  };
  EXPECT_TRUE(has("1234 tokens/s"));
  EXPECT_TRUE(has("median error 4.1 %, worst 30.0 %, over 9 steps"));
  EXPECT_TRUE(has("moved      3 layers in 1 migrations"));
  EXPECT_TRUE(has("overhead   1.00 % of the time"));
  EXPECT_TRUE(has("updates    2.50 % of the time"));
  EXPECT_TRUE(has("runs/a/: summary.json"));
  EXPECT_FALSE(has("saved")) << "no checkpoints, nothing said of them";
  EXPECT_FALSE(has("speed-up"));
}

TEST(RunReport, SaysWhatSourcesDidLast) {
  Summary summary = one_run();
  summary.runs[0].validation_step = 10;
  summary.runs[0].validation_loss = 3.25;
  summary.runs[0].generation_loss = 3.5;
  summary.runs[0].sources = {{"pruning", {{"sparsity", 0.875}, {"masks", "ab12"}}},
                             {"sparse_attention", {{"pairs", {1206272, 50}}, {"share", 0.25}}}};
  summary.runs[0].sources["moe"] = {{"counts", {{3, 5}, {4, 4}}},
                                    {"straggler_factor", {{"2", {1.25, 1.0}}, {"4", {1.5, 1.0}}}}};
  const RunCurves curves{{0.1}, {0.3}};
  std::string text;
  for (const std::string& line : report_lines(summary, std::span(&curves, 1), "a")) {
    text += line + "\n";
  }
  for (const char* wanted :
       {"validation loss 3.2500 (3.5000 as it generates)",
        "moe, last step: counts [3 5] [4 4], straggler_factor 2: 1.25 1; 4: 1.5 1\n",
        "pruning, last step: sparsity 0.875, masks ab12\n",
        "sparse_attention, last step: pairs 1206272 50, share 0.25\n"}) {
    EXPECT_NE(text.find(wanted), std::string::npos) << wanted << "\n" << text;
  }
}

TEST(RunReport, SaysTheErrorOfSeveralClocks) {
  Summary summary = one_run();
  const RunCurves curves{{0.1}, {0.3}};
  const auto count = [&] {
    const auto lines = report_lines(summary, std::span(&curves, 1), "a");
    return std::ranges::count(
        lines, "clocks     of several hosts; times in the trace are right within 5.25 ms");
  };
  EXPECT_EQ(count(), 0);
  summary.runs[0].clock_error_s = 5.25e-3;
  EXPECT_EQ(count(), 1);
}

TEST(RunReport, OfTwoRunsFitsAScreenAndExplainsItsWords) {
  Summary summary;
  summary.runs = {run_summary("static"), run_summary("balanced")};
  for (RunSummary& run : summary.runs) {
    run.validation_step = 10;
    run.validation_loss = 3.25;
    run.checkpoints_written = 2;
    run.traffic = {{WorldRank(0), WorldRank(1), Purpose::kActivation, {40, Bytes{40960}}}};
  }
  summary.speedup = 1.2;
  summary.best_speedup = 1.25;
  const std::vector<RunCurves> curves(2, {std::vector<double>(160, 0.5), {0.25, 0.5, 0.25}});
  const auto lines = report_lines(summary, curves, "a");
  EXPECT_LE(lines.size(), 25U);
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  EXPECT_NE(text.find("validation loss 3.2500"), std::string::npos) << text;
  for (const char* word : {"imbalance:", "bubble:", "overhead:", "predicted:", "digest:"}) {
    EXPECT_NE(text.find(word), std::string::npos) << "not explained: " << word << text;
  }
}

TEST(RunReport, TheDenseRunIsComparedWithTheLastOne) {
  Summary summary;
  summary.runs = {run_summary("dense"), run_summary("static"), run_summary("balanced")};
  EXPECT_EQ(compared(summary), std::pair(std::size_t{1}, std::size_t{2}));
  for (RunSummary& run : summary.runs) run.steps = 20;
  summary.runs[0].loss_digest = "of another model";
  summary.runs[0].tokens_per_s = summary.runs[0].end_tokens_per_s = 1000;
  summary.runs[1].end_tokens_per_s = 2000;
  summary.runs[2].tokens_per_s = 2500;
  summary.runs[2].end_tokens_per_s = 5000;
  summary.speedup = 1.25;
  const std::vector<RunCurves> curves(3, {std::vector<double>(160, 0.5), {0.25, 0.5, 0.25}});
  const auto text = fmt::format("{}", fmt::join(report_lines(summary, curves, "a"), "\n"));
  EXPECT_NE(text.find("the same numbers, bit for bit"), std::string::npos) << text;
  EXPECT_NE(text.find("speed-up   1.250 x (2.50 x in the last ten steps)"), std::string::npos)
      << text;
  EXPECT_NE(text.find("over dense 2.500 x (5.00 x in the last ten steps)"), std::string::npos)
      << text;
  summary.runs.erase(summary.runs.begin());
  EXPECT_EQ(compared(summary), std::pair(std::size_t{0}, std::size_t{1}));
  summary.runs.pop_back();
  EXPECT_FALSE(compared(summary));
}

TEST(RunReport, SaysWhichCheckpointsFailed) {
  Summary summary = one_run();
  summary.runs[0].checkpoints_written = 3;
  summary.runs[0].checkpoints_failed = 1;
  summary.runs[0].checkpoint_s = 0.008;
  const RunCurves curves{{0.1}, {0.3}};
  const auto lines = report_lines(summary, std::span(&curves, 1), "a");
  EXPECT_NE(std::find(lines.begin(), lines.end(),
                      "saved      3 checkpoints, 1 FAILED; training stood still 2.00 ms for each"),
            lines.end())
      << fmt::format("{}", lines[3]);
}

TEST(RunReport, SaysWhatADeviceHeld) {
  Summary summary = one_run();
  const RunCurves curves{{0.1}, {0.3}};
  const std::string line = "device mem 2.0 MiB";
  const auto has = [&] {
    const auto lines = report_lines(summary, std::span(&curves, 1), "a");
    return std::ranges::count(lines, line) > 0;
  };
  EXPECT_FALSE(has());
  summary.runs[0].device_memory_bytes = Bytes{2 << 20};
  EXPECT_TRUE(has());
}

TEST(RunReport, LayersAreListedWithTheirSums) {
  const std::string table = layer_table(two_layers());
  // A frozen layer holds its parameters alone.
  EXPECT_NE(table.find("1.0 KiB"), std::string::npos) << table;
  EXPECT_EQ(words_of(table, "0").back(), "frozen");
  const auto all = words_of(table, "all");
  ASSERT_FALSE(all.empty()) << table;
  EXPECT_EQ(all[1], "2.00") << "two forwards of 1 ms" << table;
  EXPECT_NE(table.find("5.0 KiB"), std::string::npos) << "1 of the frozen, 4 of the other" << table;
}

TEST(RunReport, AStateHasTheComputeCopyOfTheParameters) {
  cost::ModelCost model = two_layers();
  for (cost::LayerCost& layer : model.layers) layer.copy_bytes = Bytes{512};
  const std::string table = layer_table(model);
  EXPECT_NE(table.find("6.0 KiB"), std::string::npos)
      << "1.5 of the frozen, 4.5 of the other" << table;
}

TEST(RunReport, NoGainHasNoShare) {
  Summary summary = one_run();
  summary.runs.push_back(summary.runs[0]);
  const std::vector<RunCurves> curves(2, RunCurves{{0.1}, {0.3}});
  for (const double best : {0.995, 1.0, 1.007}) {
    summary.speedup = 0.988;
    summary.best_speedup = best;
    const std::string text = fmt::format("{}", fmt::join(report_lines(summary, curves, "a"), "\n"));
    EXPECT_NE(text.find("; no cut gains more than 1 %"), std::string::npos) << text;
    EXPECT_EQ(text.find("of the gain"), std::string::npos) << text;
  }
}

TEST(RunReport, ABoundIsCalledOne) {
  Summary summary = one_run();
  summary.runs.push_back(summary.runs[0]);
  summary.speedup = 1.2;
  summary.best_speedup = 1.5;
  const std::vector<RunCurves> curves(2, RunCurves{{0.1}, {0.3}});
  const auto text = [&] {
    return fmt::format("{}", fmt::join(report_lines(summary, curves, "a"), "\n"));
  };
  EXPECT_NE(text().find("best possible 1.500 x"), std::string::npos) << text();
  EXPECT_NE(text().find("from measured costs)"), std::string::npos) << text();
  summary.best_is_bound = true;
  EXPECT_NE(text().find("not more than 1.500 x is possible (a bound"), std::string::npos) << text();
  EXPECT_EQ(text().find("best possible"), std::string::npos) << text();
  summary.best_costs = CostsAre::kGiven;
  EXPECT_NE(text().find("from given costs;"), std::string::npos) << text();
  EXPECT_EQ(text().find("cuts alone"), std::string::npos) << text();
  summary.cuts_speedup = 1.25;
  EXPECT_NE(text().find("; its cuts alone, simulated: 1.250 x"), std::string::npos) << text();
}

TEST(RunReport, TrafficIsAStepsBytesByPairAndPurpose) {
  RunSummary run = run_summary("run");
  run.traffic = {{WorldRank(0), WorldRank(1), Purpose::kActivation, {40, Bytes{40960}}},
                 {WorldRank(0), WorldRank(1), Purpose::kControl, {20, Bytes{1000}}},
                 {WorldRank(1), WorldRank(0), Purpose::kGradient, {40, Bytes{20480}}}};
  const std::string table = traffic_table(run);
  EXPECT_EQ(words_of(table, "0"),
            (std::vector<std::string>{"0", "1", "4.0", "KiB", "0", "B", "0", "B", "0", "B", "100",
                                      "B", "4.1", "KiB", "6.0"}));
  EXPECT_EQ(words_of(table, "1"),
            (std::vector<std::string>{"1", "0", "0", "B", "2.0", "KiB", "0", "B", "0", "B", "0",
                                      "B", "2.0", "KiB", "4.0"}));
  run.traffic.clear();
  EXPECT_EQ(traffic_table(run), "");
  // With many pairs, the report has the largest, and the rest together.
  for (int to = 1; to < 5; ++to) {
    run.traffic.push_back(
        {WorldRank(0), WorldRank(to), Purpose::kActivation, {10, Bytes{10240 * to}}});
  }
  const std::string few = traffic_table(run, 2);
  EXPECT_EQ(words_of(few, "0")[1], "4");
  EXPECT_EQ(words_of(few, "other")[2], "3.0") << few;
}

TEST(RunReport, ReadsARunsFolder) {
  const TempFolder folder;
  Summary summary = one_run();
  summary.runs[0].traffic = {
      {WorldRank(0), WorldRank(1), Purpose::kActivation, {40, Bytes{40960}}}};
  std::string records;
  // Steps 0..9, 5..9 of them a second time after a resume.
  for (const int step : {0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9}) {
    StepRecord record;
    record.step = step;
    record.imbalance = 0.5;
    record.bubble = 0.25;
    records += record_json(record).dump() + "\n";
  }
  folder.write("records/rank-0.jsonl", records);
  const auto missing = read_report(folder.path());
  ASSERT_FALSE(missing);
  EXPECT_NE(missing.error().message.find("summary.json"), std::string::npos);
  folder.write("summary.json", summary_json(summary).dump());
  folder.write("profile.json", cost::profile_json(two_layers()).dump());
  const auto text = read_report(folder.path());
  ASSERT_TRUE(text) << text.error().message;
  const std::vector<RunCurves> curves = {
      {std::vector<double>(10, 0.5), std::vector<double>(10, 0.25)}};
  std::string printed;
  for (const auto& line : report_lines(summary, curves, folder.path().string())) {
    printed += line + "\n";
  }
  EXPECT_TRUE(text->starts_with(printed)) << *text;
  EXPECT_NE(text->find(layer_table(two_layers())), std::string::npos) << *text;
  EXPECT_NE(text->find(traffic_table(summary.runs[0])), std::string::npos) << *text;
}

}  // namespace
}  // namespace dynmo::observe
