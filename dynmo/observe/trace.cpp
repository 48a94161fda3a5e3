// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/trace.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <tuple>

#include "dynmo/core/json.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/schedule/text.h"

namespace dynmo::observe {
namespace {

using schedule::ActionKind;
using schedule::TimedAction;

constexpr int kStepTrack = 0;
constexpr std::size_t kLanes = 63;  // tracks beside a rank's for messages that overlap
int compute_track(std::size_t rank) { return static_cast<int>(1 + rank * (1 + kLanes)); }
int message_track(std::size_t rank, std::size_t lane) {
  return compute_track(rank) + 1 + static_cast<int>(std::min(lane, kLanes - 1));
}

// Assigns each message to the first track where it overlaps no other.
class Lanes {
 public:
  std::size_t place(const TimedAction& message) {
    const auto free = std::find_if(ends_.begin(), ends_.end(),
                                   [&](Nanoseconds end) { return end <= message.start; });
    const auto lane = static_cast<std::size_t>(free - ends_.begin());
    if (free == ends_.end()) ends_.emplace_back();
    ends_[lane] = message.end;
    return lane;
  }
  [[nodiscard]] std::size_t count() const { return std::min(ends_.size(), kLanes); }

 private:
  std::vector<Nanoseconds> ends_;
};

std::string quoted(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Returns exact microseconds with three decimals.
std::string microseconds(Nanoseconds time) {
  const std::int64_t ns = time.count();
  return fmt::format("{}{}.{:03}", ns < 0 ? "-" : "", std::abs(ns / 1000), std::abs(ns % 1000));
}

Nanoseconds length(const TracedStep& step) {
  Nanoseconds end = step.duration;
  for (const auto& actions : step.timeline.ranks) {
    for (const TimedAction& timed : actions) end = std::max(end, timed.end);
  }
  for (const TracedSpan& span : step.spans) end = std::max(end, span.end);
  return end;
}

class TraceText {
 public:
  void add_process(const TraceProcess& process) {
    ++process_;
    metadata("process_name", kStepTrack, process.name);
    metadata("thread_name", kStepTrack, "steps");
    std::vector<std::size_t> lanes;
    Nanoseconds origin{0};
    for (const TracedStep& step : process.steps) {
      const Nanoseconds duration = length(step);
      slice(fmt::format("step {}", step.step), "step", kStepTrack, origin, duration,
            fmt::format(R"({{"step":{}}})", step.step));
      const Messages messages = add_actions(step, origin, lanes);
      add_spans(step, origin);
      add_arrows(step, origin, messages);
      add_memory(step, origin);
      origin += duration;
    }
    name_tracks(lanes);
  }

  // Returns the whole document. `more` has further members of the object.
  std::string finish(const std::string& more) && { return head_ + events_ + "\n]" + more + "}\n"; }

 private:
  void event(std::string_view text) {
    events_ += first_ ? "\n" : ",\n";
    first_ = false;
    events_ += text;
  }

  void metadata(std::string_view what, int track, const std::string& name) {
    event(fmt::format(R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{"name":{}}}}})", what,
                      process_, track, quoted(name)));
  }

  void slice(std::string_view name, std::string_view category, int track, Nanoseconds start,
             Nanoseconds duration, std::string_view arguments) {
    event(fmt::format(
        R"({{"ph":"X","name":"{}","cat":"{}","pid":{},"tid":{},"ts":{},"dur":{},"args":{}}})", name,
        category, process_, track, microseconds(start), microseconds(duration), arguments));
  }

  void name_tracks(const std::vector<std::size_t>& lanes) {
    for (std::size_t r = 0; r < lanes.size(); ++r) {
      metadata("thread_name", compute_track(r), fmt::format("rank {}", r));
      for (std::size_t lane = 0; lane < lanes[r]; ++lane) {
        metadata("thread_name", message_track(r, lane), fmt::format("rank {} messages", r));
      }
    }
  }

  struct Place {
    int track = 0;
    const TimedAction* timed = nullptr;
  };
  using Messages = std::map<schedule::Action, Place>;

  // Adds the slices of a step. Returns where each message was drawn. Raises `lanes` to the number
  // of message tracks of each rank.
  Messages add_actions(const TracedStep& step, Nanoseconds origin,
                       std::vector<std::size_t>& lanes) {
    Messages drawn;
    lanes.resize(std::max(lanes.size(), step.timeline.ranks.size()), 0);
    for (std::size_t r = 0; r < step.timeline.ranks.size(); ++r) {
      Lanes messages;
      for (const TimedAction& timed : step.timeline.ranks[r]) {
        const bool compute = schedule::is_compute(timed.action.kind);
        const int track = compute ? compute_track(r) : message_track(r, messages.place(timed));
        if (!compute) drawn[timed.action] = {track, &timed};
        slice(schedule::to_string(timed.action), schedule::name(timed.action.kind), track,
              origin + timed.start, timed.end - timed.start,
              fmt::format(R"({{"stage":{},"micro_batch":{},"step":{}}})", timed.action.stage,
                          timed.action.micro_batch, step.step));
      }
      lanes[r] = std::max(lanes[r], messages.count());
    }
    return drawn;
  }

  void add_spans(const TracedStep& step, Nanoseconds origin) {
    for (const TracedSpan& span : step.spans) {
      slice(span.name, "beside", compute_track(span.rank), origin + span.start,
            span.end - span.start, fmt::format(R"({{"step":{}}})", step.step));
    }
  }

  void add_memory(const TracedStep& step, Nanoseconds origin) {
    for (std::size_t r = 0; r < step.memory.size(); ++r) {
      for (const sim::MemoryStep& held : step.memory[r]) {
        event(fmt::format(
            R"({{"ph":"C","name":"rank {} memory","pid":{},"ts":{},"args":{{"bytes":{}}}}})", r,
            process_, microseconds(origin + held.time), held.bytes.value));
      }
    }
  }

  // Draws arrows between ranks. An activation goes from F of a stage to F of the next one. A
  // gradient goes from B or I to that of the previous stage.
  void add_arrows(const TracedStep& step, Nanoseconds origin, const Messages& messages) {
    std::map<std::tuple<bool, int, int>, Place> places;  // (is forward, stage, micro-batch)
    for (std::size_t r = 0; r < step.timeline.ranks.size(); ++r) {
      for (const TimedAction& timed : step.timeline.ranks[r]) {
        const ActionKind kind = timed.action.kind;
        if (!schedule::is_compute(kind) || kind == ActionKind::kWeightGradient) continue;
        places[{kind == ActionKind::kForward, timed.action.stage.value,
                timed.action.micro_batch.value}] = {compute_track(r), &timed};
      }
    }
    for (const auto& [key, from] : places) {
      const auto& [forward, stage, micro_batch] = key;
      const auto to = places.find({forward, forward ? stage + 1 : stage - 1, micro_batch});
      if (to == places.end() || to->second.track == from.track) continue;
      const ActionKind kind = forward ? ActionKind::kSendActivation : ActionKind::kSendGradient;
      const schedule::Action send{kind, StageId(stage), MicroBatchId(micro_batch)};
      std::vector<Place> on_the_way;
      for (const schedule::Action& message : {send, schedule::peer(send)}) {
        const auto found = messages.find(message);
        if (found != messages.end()) on_the_way.push_back(found->second);
      }
      arrow(forward ? "activation" : "gradient", from, on_the_way, to->second, origin);
    }
  }

  void arrow(std::string_view name, const Place& from, const std::vector<Place>& on_the_way,
             const Place& to, Nanoseconds origin) {
    ++arrows_;
    // The arrow begins inside its slice, or the viewer could not assign it.
    const Nanoseconds leaves = std::max(from.timed->start, from.timed->end - Nanoseconds{1});
    const auto end = [&](std::string_view phase, int track, Nanoseconds time) {
      event(fmt::format(
          R"({{"ph":{},"name":"{}","cat":"message","id":{},"pid":{},"tid":{},"ts":{}}})", phase,
          name, arrows_, process_, track, microseconds(origin + time)));
    };
    end(R"("s")", from.track, leaves);
    for (const Place& message : on_the_way) {
      // Where it ends: a receive is posted before its value exists.
      const TimedAction& timed = *message.timed;
      end(R"("t")", message.track, std::max(timed.start, timed.end - Nanoseconds{1}));
    }
    end(R"("f","bp":"e")", to.track, to.timed->start);
  }

  std::string head_ = R"({"displayTimeUnit":"ms","traceEvents":[)";
  std::string events_;
  bool first_ = true;
  int process_ = -1;
  std::int64_t arrows_ = 0;
};

}  // namespace

Json clocks_json(std::span<const TraceClock> clocks) {
  Json ranks = Json::array();
  double error_s = 0;
  for (const TraceClock& clock : clocks) {
    ranks.push_back({{"offset_s", clock.offset_s}, {"error_s", clock.error_s}});
    error_s = std::max(error_s, clock.error_s);
  }
  return {{"error_s", error_s}, {"ranks", std::move(ranks)}};
}

std::string trace_json(std::span<const TraceProcess> processes,
                       std::span<const TraceClock> clocks) {
  TraceText text;
  for (const TraceProcess& process : processes) text.add_process(process);
  if (clocks.empty()) return std::move(text).finish("");
  const Json other = {{"clocks", clocks_json(clocks)}};
  return std::move(text).finish(",\"otherData\":" + other.dump());
}

}  // namespace dynmo::observe
