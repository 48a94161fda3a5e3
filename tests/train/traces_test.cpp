// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/traces.h"

#include <gtest/gtest.h>

#include <map>

#include "dynmo/core/json.h"
#include "dynmo/transport/in_process.h"
#include "tests/support/temp_folder.h"

namespace dynmo::train {
namespace {

using schedule::ActionKind;

constexpr std::int64_t kMillisecond = 1000000;
constexpr std::int64_t kAhead = 3000 * kMillisecond;  // of rank 1's clock

schedule::TimedAction timed_action(ActionKind kind, int stage, std::int64_t start,
                                   std::int64_t end) {
  return {.action = {kind, StageId(stage), MicroBatchId(0)},
          .start = Nanoseconds{start * kMillisecond},
          .end = Nanoseconds{end * kMillisecond}};
}

// Rank 0 sends at 10 ms what rank 1 has at 15 ms, and gets the gradient 30 ms after its start.
std::deque<StepTrace> traced_step_of(std::size_t rank, std::int64_t begin_ns) {
  StepTrace step{.step = 7, .start_ns = begin_ns, .actions = {}};
  if (rank == 0) {
    step.actions = {timed_action(ActionKind::kForward, 0, 0, 10),
                    timed_action(ActionKind::kSendActivation, 0, 10, 40),
                    timed_action(ActionKind::kReceiveGradient, 0, 10, 30)};
  } else {
    step.actions = {timed_action(ActionKind::kReceiveActivation, 1, 0, 14),
                    timed_action(ActionKind::kForward, 1, 14, 20),
                    timed_action(ActionKind::kSendGradient, 1, 25, 39)};
    step.start_ns += kAhead + kMillisecond;
    step.spans = {{SpanKind::kCheckpoint, step.start_ns + 40 * kMillisecond,
                   step.start_ns + 45 * kMillisecond}};
  }
  return {step};
}

// Returns the trace.json of both ranks.
Json written_trace(const std::vector<transport::ClockFit>& clocks) {
  const TempFolder folder;
  const auto path = folder.path() / "trace.json";
  const auto status = transport::run_ranks(2, [&](transport::Transport& group) -> Expected<void> {
    DYNMO_ASSIGN(const JointTrace joint,
                 gather_traces(group, 3, traced_step_of(group.rank().index(), 1000000000), clocks));
    EXPECT_EQ(joint.ranks.empty(), group.rank() != transport::Member(0));
    if (!joint.ranks.empty()) DYNMO_TRY(write_trace(joint, 1, "measured", path));
    return {};
  });
  EXPECT_TRUE(status.has_value()) << status.error().message;
  return *read_json(path);
}

std::map<std::string, std::pair<double, double>> slices_of(const Json& trace) {
  std::map<std::string, std::pair<double, double>> slices;
  for (const Json& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const double start = event["ts"];
    slices[event["name"]] = {start, start + event["dur"].get<double>()};
  }
  return slices;
}

TEST(Traces, AreOnTheClockOfRank0) {
  const transport::ClockReading reading{
      .at_ns = kAhead, .offset_ns = kAhead, .error_ns = kMillisecond / 2};
  const Json trace = written_trace({{}, {.first = reading, .last = reading}});
  const auto slices = slices_of(trace);
  EXPECT_EQ(slices.at("0F0"), std::pair(0.0, 10000.0));
  EXPECT_EQ(slices.at("1RECV_F0"), std::pair(1000.0, 15000.0));
  EXPECT_EQ(slices.at("0SEND_F0"), std::pair(10000.0, 15000.0));
  EXPECT_EQ(slices.at("1SEND_B0"), std::pair(26000.0, 30000.0));
  EXPECT_EQ(slices.at("checkpoint"), std::pair(41000.0, 46000.0));
  const Json& clocks = trace["otherData"]["clocks"];
  EXPECT_EQ(clocks["ranks"][0], (Json{{"offset_s", 0.0}, {"error_s", 0.0}}));
  EXPECT_EQ(clocks["ranks"][1]["offset_s"], 3.0);
  // The step began a second after the measurement at 0 s of rank 0's clock.
  EXPECT_NEAR(clocks["ranks"][1]["error_s"], 0.5e-3 + 1.046e-4, 1e-9);
  EXPECT_EQ(clocks["error_s"], clocks["ranks"][1]["error_s"]);
}

TEST(Traces, StayAsTheyAreOnOneClock) {
  const Json trace = written_trace({{}, {}});
  const auto slices = slices_of(trace);
  EXPECT_EQ(slices.at("1RECV_F0"), std::pair(3001000.0, 3015000.0));
  EXPECT_FALSE(trace.contains("otherData"));
}

}  // namespace
}  // namespace dynmo::train
