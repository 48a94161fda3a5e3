// SPDX-License-Identifier: Apache-2.0
// A rank that comes to lead goes on with what the one before knew of the run.
#include "dynmo/train/setup/run_series.h"

#include <gtest/gtest.h>

#include <limits>

namespace dynmo::train {
namespace {

plan::Plan plan_on(int ranks) {
  plan::Plan plan;
  plan.ranks = ranks;
  for (int i = 0; i < ranks; ++i) {
    plan.stages.push_back({.rank = Rank(i), .layers = {.first = LayerId(2 * i), .count = 2}});
  }
  return plan;
}

void add_steps(RunSeries& series, std::int64_t first, std::int64_t last) {
  for (std::int64_t step = first; step < last; ++step) {
    runtime::StepReport report;
    report.step = step;
    report.loss = step == 7 ? std::numeric_limits<double>::quiet_NaN()
                            : 3.0 / (1.0 + static_cast<double>(step));
    report.step_s = 0.1 + 1e-3 * static_cast<double>(step % 5);
    report.predicted_s = 0.1;
    report.imbalance = 0.25;
    report.bubble = 1.0 / 3;
    report.frozen_layers = static_cast<int>(step / 10);
    report.moved_layers = step % 50 == 3 ? 2 : 0;
    report.moved_bytes = Bytes(step % 50 == 3 ? 100 : 0);
    series.add(report, plan_on(step < 20 ? 3 : 2));
  }
}

TEST(RunSeries, AnotherRankGoesOnWithIt) {
  RunSeries whole("run");
  RunSeries begun("run");
  for (RunSeries* series : {&whole, &begun}) {
    add_steps(*series, 0, 5000);  // more than the sample holds
    series->validation.emplace_back(10, 2.5);
    series->validation.emplace_back(20, std::numeric_limits<double>::quiet_NaN());
    series->traffic.push_back(
        {.from = 0, .to = 1, .purpose = "gradient", .messages = 3, .bytes = Bytes(1000)});
    series->generation_loss = 2.25;
    series->sources = {{"pruning", {{"kept", 0.5}}}};
    series->size_changes = 2;
    series->members = 4;
  }
  RunSeries next("run");
  add_steps(next, 4000, 4100);  // what it has seen itself
  const auto restored = next.restore(parse_json(begun.to_json().dump(), "the test").value());
  ASSERT_TRUE(restored) << restored.error().message;
  add_steps(whole, 5000, 5100);
  add_steps(next, 5000, 5100);
  EXPECT_TRUE(next.to_json().dump() == whole.to_json().dump());  // (too long to be printed)
  EXPECT_EQ(next.loss_digest(), whole.loss_digest());
  EXPECT_EQ(next.count(), 5100);
  EXPECT_EQ(next.saved_rank_s, whole.saved_rank_s);
}

TEST(RunSeries, WhatIsNoSeriesIsRefused) {
  const Json good = RunSeries("run").to_json();
  for (const auto& item : good.items()) {
    Json without = good;
    without.erase(item.key());
    EXPECT_FALSE(RunSeries("run").restore(without)) << item.key();
  }
  EXPECT_FALSE(RunSeries("run").restore(Json()));
}

}  // namespace
}  // namespace dynmo::train
