// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/move_log.h"

#include <gtest/gtest.h>

namespace dynmo::train {
namespace {

runtime::StepReport step(std::int64_t number, double step_s) {
  runtime::StepReport report;
  report.step = number;
  report.step_s = step_s;
  return report;
}

runtime::StepReport move(std::int64_t number, double step_s) {
  runtime::StepReport report = step(number, step_s + 0.01);
  report.moved_layers = 2;
  report.migrate_s = report.move_pause_s = 0.01;
  report.decision.emplace();
  report.decision->reason = "move 4|4 to 6|2: 200 ms -> 150 ms a step";
  report.decision->current_step_s = 0.2;
  report.decision->planned_step_s = 0.15;
  return report;
}

using Lines = std::vector<std::string>;
const plan::Plan kPlan = plan::make_plan({6, 2}, schedule::ScheduleKind::k1F1B, 1);

TEST(MoveLog, SaysAMoveAtOnceAndItsGainAfterThreeSteps) {
  MoveLog log;
  for (int i = 0; i < 5; ++i) EXPECT_EQ(log.add("balanced", step(i, 0.2), kPlan), Lines());
  EXPECT_EQ(
      log.add("balanced", move(5, 0.16), kPlan),
      Lines{"step     5  balanced: move 4|4 to 6|2: 200 ms -> 150 ms a step, moved in 10.00 ms"});
  EXPECT_EQ(log.add("balanced", step(6, 0.18), kPlan), Lines());
  EXPECT_EQ(
      log.add("balanced", step(7, 0.16), kPlan),
      Lines{"step     7  balanced: the move at step 5 gained 20.0 % (predicted 25.0 %): a step "
            "took 200.00 ms before, 160.00 ms after"});
  EXPECT_EQ(log.add("balanced", step(8, 0.3), kPlan), Lines());
}

// Layers move while step 5 runs, and the plan is in force from step 6 on; another move begins then.
TEST(MoveLog, TellsOfAMoveDuringAStepOnceThePlanIsInForce) {
  MoveLog log;
  for (int i = 0; i < 5; ++i) EXPECT_EQ(log.add("run", step(i, 0.2), kPlan), Lines());
  runtime::StepReport decides = move(5, 0.2);
  decides.moved_layers = 0;
  decides.decision->migrate = true;
  EXPECT_EQ(log.add("run", decides, kPlan), Lines());
  runtime::StepReport moved = move(6, 0.16);
  moved.migrate_s = 0.001;
  moved.decision->migrate = true;
  moved.decision->reason = "move 6|2 to 5|3";
  moved.decision->planned_step_s = 0.1;
  EXPECT_EQ(log.add("run", moved, kPlan),
            Lines{"step     6  run: move 4|4 to 6|2: 200 ms -> 150 ms a step, moved in 10.00 ms"});
  EXPECT_EQ(log.add("run", step(7, 0.16), kPlan), Lines());
  EXPECT_EQ(log.add("run", step(8, 0.16), kPlan).size(), 1U);
}

// A copy was refused: the next move is told of by its own reason.
TEST(MoveLog, ForgetsAMoveThatNeverCameIntoForce) {
  MoveLog log;
  runtime::StepReport decides = move(0, 0.2);
  decides.moved_layers = 0;
  decides.decision->migrate = true;
  EXPECT_EQ(log.add("run", decides, kPlan), Lines());
  EXPECT_EQ(log.add("run", step(1, 0.2), kPlan), Lines());
  runtime::StepReport moved = step(2, 0.2);
  moved.moved_layers = 1;
  EXPECT_EQ(log.add("run", moved, kPlan).front().find("step     2  run: moved to "), 0U);
}

// The gain of pruning is not the move's.
TEST(MoveLog, SaysWhereTheWorkChangedAtTheSameStep) {
  MoveLog log;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(log.add("run", step(i, 0.4), kPlan), Lines());
  runtime::StepReport event = move(3, 0.2);
  event.announced = cost::Announced::kPredicted;
  EXPECT_EQ(log.add("run", event, kPlan).size(), 1U);
  EXPECT_EQ(log.add("run", step(4, 0.2), kPlan), Lines());
  EXPECT_EQ(log.add("run", step(5, 0.2), kPlan),
            Lines{"step     5  run: the change of work and the move at step 3 gained 50.0 % "
                  "(predicted of the move alone 25.0 %): a step took 400.00 ms before, 200.00 ms "
                  "after"});
}

// The plan between them did not last long enough to say anything about it.
TEST(MoveLog, SaysNothingOfAMoveThatAnotherFollowed) {
  MoveLog log;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(log.add("run", step(i, 0.2), kPlan), Lines());
  EXPECT_EQ(log.add("run", move(3, 0.2), kPlan).size(), 1U);
  EXPECT_EQ(log.add("run", move(4, 0.1), kPlan).size(), 1U);
  EXPECT_EQ(log.add("run", step(5, 0.1), kPlan), Lines());
  const Lines lines = log.add("run", step(6, 0.1), kPlan);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_NE(lines[0].find("the move at step 4 gained 50.0 %"), std::string::npos) << lines[0];
}

}  // namespace
}  // namespace dynmo::train
