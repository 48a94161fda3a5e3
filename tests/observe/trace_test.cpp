// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/json.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/schedule/text.h"
#include "dynmo/sim/simulate.h"

namespace dynmo::observe {
namespace {

sim::SimResult replayed(int ranks, int micro_batches) {
  schedule::PipelineShape shape;
  shape.ranks = ranks;
  shape.micro_batches = micro_batches;
  for (int r = 0; r < ranks; ++r) shape.stages.push_back({.rank = Rank{r}});
  const std::vector<sim::StageCost> costs(static_cast<std::size_t>(ranks),
                                          {.forward = Nanoseconds(1001),
                                           .input_gradient = Nanoseconds(1500),
                                           .weight_gradient = Nanoseconds(700),
                                           .update = Nanoseconds(10),
                                           .state = {},
                                           .activation = Bytes{4},
                                           .boundary = Bytes{100}});
  cost::Cluster cluster = cost::equal_ranks(ranks);
  cluster.inside_node = {1e-7, 1e9};
  const auto compute = schedule::make_schedule(schedule::ScheduleKind::k1F1B, shape);
  return *sim::simulate(schedule::lower(*compute), costs, cluster,
                        {.timeline = true, .memory = true});
}

schedule::Timeline simulated(int ranks, int micro_batches) {
  return replayed(ranks, micro_batches).timeline;
}

Json parsed(const std::vector<TraceProcess>& processes) {
  const auto json = parse_json(trace_json(processes), "trace");
  EXPECT_TRUE(json) << json.error().message;
  return *json;
}

TEST(Trace, HasASliceForEveryActionWithItsTimes) {
  const schedule::Timeline timeline = simulated(3, 4);
  const Json json = parsed({{.name = "simulated", .steps = {{.step = 5, .timeline = timeline}}}});
  std::map<std::string, std::pair<double, double>> slices;
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] == "X" && event["cat"] != "step") {
      EXPECT_TRUE(slices.emplace(event["name"], std::pair(event["ts"], event["dur"])).second);
      EXPECT_EQ(event["args"]["step"], 5);
    }
  }
  std::size_t actions = 0;
  for (const auto& rank : timeline.ranks) {
    for (const auto& timed : rank) {
      const auto found = slices.find(schedule::to_string(timed.action));
      ASSERT_NE(found, slices.end()) << schedule::to_string(timed.action);
      EXPECT_NEAR(found->second.first, static_cast<double>(timed.start.count()) / 1000, 1e-9);
      EXPECT_NEAR(found->second.second,
                  static_cast<double>((timed.end - timed.start).count()) / 1000, 1e-9);
      ++actions;
    }
  }
  EXPECT_EQ(slices.size(), actions);
}

TEST(Trace, NoTwoSlicesOfATrackOverlap) {
  const TracedStep step{.step = 0, .timeline = simulated(4, 8)};
  const Json json = parsed({{.name = "a", .steps = {step, step, step}}});
  std::map<std::int64_t, std::vector<std::pair<std::int64_t, std::int64_t>>> tracks;
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const auto start = std::llround(event["ts"].get<double>() * 1000);
    tracks[event["tid"]].emplace_back(start,
                                      start + std::llround(event["dur"].get<double>() * 1000));
  }
  EXPECT_GE(tracks.size(), 5U);  // steps and four ranks
  for (auto& [track, slices] : tracks) {
    std::sort(slices.begin(), slices.end());
    for (std::size_t i = 1; i < slices.size(); ++i) {
      EXPECT_LE(slices[i - 1].second, slices[i].first) << "track " << track;
    }
  }
}

TEST(Trace, StepsFollowOneAnother) {
  const TracedStep step{.step = 1, .timeline = simulated(2, 2), .duration = Nanoseconds(1'000'000)};
  TracedStep next = step;
  next.step = 2;
  const Json json = parsed({{.name = "a", .steps = {step, next}}});
  std::vector<double> starts;
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] == "X" && event["cat"] == "step") starts.push_back(event["ts"]);
  }
  EXPECT_EQ(starts, (std::vector<double>{0, 1000}));
}

TEST(Trace, MemoryIsACurveARank) {
  const sim::SimResult result = replayed(3, 4);
  const TracedStep step{.step = 0,
                        .timeline = result.timeline,
                        .duration = Nanoseconds(1'000'000),
                        .memory = result.memory};
  const Json json = parsed({{.name = "a", .steps = {step, step}}});
  std::map<std::string, std::vector<std::pair<double, std::int64_t>>> curves;
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] == "C") {
      curves[event["name"]].emplace_back(event["ts"], event["args"]["bytes"]);
    }
  }
  ASSERT_EQ(curves.size(), 3U);
  for (std::size_t r = 0; r < 3; ++r) {
    const auto& curve = curves.at(fmt::format("rank {} memory", r));
    const std::vector<sim::MemoryStep>& held = result.memory[r];
    ASSERT_EQ(held.size(), 1U + 2 * 4) << "the state, then both ends of four stashes";
    ASSERT_EQ(curve.size(), 2 * held.size());
    for (std::size_t i = 0; i < curve.size(); ++i) {
      const bool second = i >= held.size();
      const sim::MemoryStep& wanted = held[i % held.size()];
      EXPECT_NEAR(curve[i].first,
                  static_cast<double>(wanted.time.count()) / 1000 + (second ? 1000 : 0), 1e-9);
      EXPECT_EQ(curve[i].second, wanted.bytes.value);
    }
  }
}

TEST(Trace, ArrowsJoinTheSlicesTheyMean) {
  const Json json = parsed({{.name = "a", .steps = {{.step = 0, .timeline = simulated(3, 2)}}}});
  const auto slice_at = [&](const Json& end) {
    for (const Json& event : json["traceEvents"]) {
      if (event["ph"] == "X" && event["tid"] == end["tid"] && event["ts"] <= end["ts"] &&
          end["ts"].get<double>() < event["ts"].get<double>() + event["dur"].get<double>()) {
        return event["name"].get<std::string>();
      }
    }
    return std::string("none");
  };
  std::map<int, std::string> from;
  std::set<std::string> arrows;
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] == "s") from[event["id"]] = slice_at(event);
    if (event["ph"] == "f") arrows.insert(from.at(event["id"]) + ">" + slice_at(event));
  }
  EXPECT_EQ(arrows, (std::set<std::string>{"0F0>1F0", "0F1>1F1", "1F0>2F0", "1F1>2F1", "2B0>1B0",
                                           "2B1>1B1", "1B0>0B0", "1B1>0B1"}));
}

// The slice of a track that an event lies in; "none".
std::string slice_at(const Json& trace, const Json& event) {
  for (const Json& slice : trace["traceEvents"]) {
    if (slice["ph"] == "X" && slice["tid"] == event["tid"] && slice["ts"] <= event["ts"] &&
        event["ts"].get<double>() < slice["ts"].get<double>() + slice["dur"].get<double>()) {
      return slice["name"];
    }
  }
  return "none";
}

TEST(Trace, EverySendIsTiedToItsReceive) {
  for (const int ranks : {2, 4}) {
    const schedule::Timeline timeline = simulated(ranks, 3);
    const Json json = parsed({{.name = "a", .steps = {{.step = 0, .timeline = timeline}}}});
    // Collects for each flow the slices it passes, in order of time.
    std::map<int, std::vector<std::string>> flows;
    std::map<int, double> reached;
    for (const Json& event : json["traceEvents"]) {
      if (event["ph"] != "s" && event["ph"] != "t" && event["ph"] != "f") continue;
      flows[event["id"]].push_back(slice_at(json, event));
      EXPECT_GE(event["ts"].get<double>(), reached[event["id"]]);
      reached[event["id"]] = event["ts"];
    }
    std::set<std::pair<std::string, std::string>> tied;
    for (const auto& [id, slices] : flows) {
      ASSERT_EQ(slices.size(), 4U);
      EXPECT_TRUE(tied.emplace(slices[1], slices[2]).second) << slices[1];
    }
    std::set<std::pair<std::string, std::string>> expected;
    for (const auto& rank : timeline.ranks) {
      for (const auto& timed : rank) {
        const schedule::ActionKind kind = timed.action.kind;
        if (kind != schedule::ActionKind::kSendActivation &&
            kind != schedule::ActionKind::kSendGradient) {
          continue;
        }
        expected.emplace(schedule::to_string(timed.action),
                         schedule::to_string(schedule::peer(timed.action)));
      }
    }
    EXPECT_EQ(expected.size(), static_cast<std::size_t>(2 * 3 * (ranks - 1)));
    EXPECT_EQ(tied, expected);
  }
}

TEST(Trace, WhatRanksDoBesideTheScheduleIsASliceAndPartOfTheStep) {
  TracedStep step{.step = 4, .timeline = simulated(2, 2)};
  step.spans = {{.rank = 1,
                 .name = "checkpoint",
                 .start = Nanoseconds(1'000'000),
                 .end = Nanoseconds(1'500'000)}};
  const Json json = parsed({{.name = "a", .steps = {step, step}}});
  std::vector<std::pair<double, double>> found;
  std::set<std::string> tracks;
  std::map<std::int64_t, std::string> names;
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] == "M" && event["name"] == "thread_name") {
      names[event["tid"]] = event["args"]["name"];
    }
  }
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] != "X" || event["name"] != "checkpoint") continue;
    found.emplace_back(event["ts"], event["dur"]);
    tracks.insert(names.at(event["tid"]));
    EXPECT_EQ(event["args"]["step"], 4);
  }
  EXPECT_EQ(found, (std::vector<std::pair<double, double>>{{1000, 500}, {2500, 500}}));
  EXPECT_EQ(tracks, std::set<std::string>{"rank 1"});
}

TEST(Trace, ProcessesAreNamedAndAnyNameIsValid) {
  const Json json =
      parsed({{.name = "measured \"a\"\n\xff", .steps = {}},
              {.name = "simulated", .steps = {{.step = 0, .timeline = simulated(2, 1)}}}});
  std::set<std::string> names;
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] == "M") names.insert(event["args"]["name"]);
  }
  EXPECT_TRUE(names.contains("simulated"));
  EXPECT_TRUE(names.contains("rank 1"));
  EXPECT_TRUE(names.contains("measured \"a\"\n\xEF\xBF\xBD"));
  EXPECT_TRUE(parse_json(trace_json({}), "empty"));
}

TEST(Trace, SaysTheClocksBesideItsEvents) {
  const std::vector<TraceProcess> processes = {
      {.name = "a", .steps = {{.step = 0, .timeline = simulated(2, 1)}}}};
  const Json one = parsed(processes);
  EXPECT_FALSE(one.contains("otherData"));
  const std::vector<TraceClock> clocks = {{}, {.offset_s = 3.25, .error_s = 0.5}, {-1, 0.25}};
  const auto several = parse_json(trace_json(processes, clocks), "trace");
  ASSERT_TRUE(several) << several.error().message;
  EXPECT_EQ((*several)["traceEvents"], one["traceEvents"]);
  EXPECT_EQ((*several)["otherData"]["clocks"],
            Json::parse(R"({"error_s": 0.5, "ranks": [{"offset_s": 0.0, "error_s": 0.0},
                {"offset_s": 3.25, "error_s": 0.5}, {"offset_s": -1.0, "error_s": 0.25}]})"));
}

}  // namespace
}  // namespace dynmo::observe
