// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/traces.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/files.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/transport/gather.h"

namespace dynmo::train {
namespace {

static_assert(std::is_trivially_copyable_v<schedule::TimedAction> &&
              std::is_trivially_copyable_v<TraceSpan>);

// Appends the bytes of a value. All ranks run one build, so they are the format.
template <typename T>
void put(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

template <typename T>
T take(std::string_view& bytes) {
  T value{};
  std::memcpy(&value, bytes.data(), sizeof(T));
  bytes.remove_prefix(sizeof(T));
  return value;
}

template <typename T>
void put_all(std::string& bytes, const std::vector<T>& values) {
  put(bytes, static_cast<std::uint64_t>(values.size()));
  for (const T& value : values) put(bytes, value);
}

template <typename T>
std::vector<T> take_all(std::string_view& bytes) {
  std::vector<T> values(take<std::uint64_t>(bytes));
  for (T& value : values) value = take<T>(bytes);
  return values;
}

std::string encode(const std::deque<StepTrace>& steps) {
  std::string bytes;
  for (const StepTrace& step : steps) {
    put(bytes, step.step);
    put(bytes, step.start_ns);
    put_all(bytes, step.actions);
    put_all(bytes, step.spans);
  }
  return bytes;
}

std::vector<StepTrace> decode(std::string_view bytes) {
  std::vector<StepTrace> steps;
  while (!bytes.empty()) {
    StepTrace& step = steps.emplace_back();
    step.step = take<std::int64_t>(bytes);
    step.start_ns = take<std::int64_t>(bytes);
    step.actions = take_all<schedule::TimedAction>(bytes);
    step.spans = take_all<TraceSpan>(bytes);
  }
  return steps;
}

const char* name(SpanKind kind) {
  switch (kind) {
    case SpanKind::kProfile:
      return "profile";
    case SpanKind::kPlan:
      return "plan";
    case SpanKind::kMigrate:
      return "migrate";
    case SpanKind::kValidation:
      return "validation";
    case SpanKind::kCheckpoint:
      break;
  }
  return "checkpoint";
}

// Ends each send with its receive. The sender itself notices the end only at the end of the step.
void end_sends_with_their_receives(schedule::Timeline& timeline) {
  std::map<schedule::Action, Nanoseconds> arrivals;
  for (const auto& rank : timeline.ranks) {
    for (const auto& timed : rank) arrivals[timed.action] = timed.end;
  }
  for (auto& rank : timeline.ranks) {
    for (auto& [action, start, end] : rank) {
      const bool sends = action.kind == schedule::ActionKind::kSendActivation ||
                         action.kind == schedule::ActionKind::kSendGradient;
      if (!sends) continue;
      const auto arrival = arrivals.find(schedule::peer(action));
      if (arrival != arrivals.end()) end = std::max(start, std::min(end, arrival->second));
    }
  }
}

// Converts the times of a rank to the clock of rank 0.
class ToFirstClock {
 public:
  explicit ToFirstClock(const transport::ClockFit& clock) : clock_(clock) {}

  void convert(StepTrace& step) {
    const std::int64_t start_ns = converted(step.start_ns);
    for (schedule::TimedAction& action : step.actions) {
      for (Nanoseconds* time : {&action.start, &action.end}) {
        *time = Nanoseconds{converted(step.start_ns + time->count()) - start_ns};
      }
    }
    for (TraceSpan& span : step.spans) {
      span.start_ns = converted(span.start_ns);
      span.end_ns = converted(span.end_ns);
    }
    step.start_ns = start_ns;
  }
  // Returns the clock with the largest error of all times so far.
  [[nodiscard]] observe::TraceClock clock() const {
    return {.offset_s = to_seconds(Nanoseconds{clock_.last.offset_ns}),
            .error_s = to_seconds(Nanoseconds{error_ns_})};
  }

 private:
  std::int64_t converted(std::int64_t time_ns) {
    const transport::ClockReading reading = clock_.at(time_ns);
    error_ns_ = std::max(error_ns_, reading.error_ns);
    return time_ns - reading.offset_ns;
  }

  const transport::ClockFit& clock_;
  std::int64_t error_ns_ = 0;
};

// Returns a step with times since the start of the first rank to start.
observe::TracedStep traced(const std::vector<std::vector<StepTrace>>& ranks, std::size_t i) {
  std::int64_t start = ranks[0][i].start_ns;
  for (const auto& rank : ranks) {
    start = std::min(start, rank[i].start_ns);
    for (const TraceSpan& span : rank[i].spans) start = std::min(start, span.start_ns);
  }
  observe::TracedStep step{.step = ranks[0][i].step, .timeline = {}};
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const Nanoseconds shift{ranks[r][i].start_ns - start};
    auto& actions = step.timeline.ranks.emplace_back(ranks[r][i].actions);
    for (schedule::TimedAction& action : actions) {
      action.start += shift;
      action.end += shift;
    }
    for (const TraceSpan& span : ranks[r][i].spans) {
      step.spans.push_back({.rank = r,
                            .name = name(span.kind),
                            .start = Nanoseconds{span.start_ns - start},
                            .end = Nanoseconds{span.end_ns - start}});
    }
  }
  end_sends_with_their_receives(step.timeline);
  return step;
}

}  // namespace

StepTrace step_trace(const runtime::StepReport& report, std::int64_t begin_ns) {
  StepTrace trace{report.step, report.start_ns, report.actions};
  trace.actions.insert(trace.actions.end(), report.messages.begin(), report.messages.end());
  std::stable_sort(trace.actions.begin(), trace.actions.end(),
                   [](const auto& a, const auto& b) { return a.start < b.start; });
  std::int64_t from = begin_ns;
  const auto add = [&](SpanKind kind, double seconds) {
    if (seconds <= 0) return;
    const std::int64_t to = from + to_nanoseconds(seconds).count();
    trace.spans.push_back({kind, from, to});
    from = to;
  };
  add(SpanKind::kProfile, report.profile_s);
  add(SpanKind::kPlan, report.plan_s);
  add(SpanKind::kMigrate, report.migrate_s - report.migrate_end_s);
  if (!report.actions.empty()) from = report.start_ns + report.actions.back().end.count();
  add(SpanKind::kMigrate, report.migrate_end_s);
  return trace;
}

Expected<JointTrace> gather_traces(transport::Transport& transport, transport::Tag tag,
                                   const std::deque<StepTrace>& mine,
                                   std::span<const transport::ClockFit> clocks) {
  DYNMO_CHECK(std::ssize(clocks) == transport.size(), "clocks of {} ranks, got {}",
              transport.size(), clocks.size());
  DYNMO_ASSIGN(const auto texts, transport::gather_texts(transport, tag, encode(mine)));
  JointTrace joint;
  if (transport.rank() != transport::Member(0) || mine.empty()) return joint;
  const bool is_one = std::ranges::all_of(clocks, &transport::ClockFit::is_shared);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    auto& steps = joint.ranks.emplace_back(decode(texts[rank]));
    if (is_one) continue;
    ToFirstClock clock(clocks[rank]);
    for (StepTrace& step : steps) clock.convert(step);
    joint.clocks.push_back(clock.clock());
  }
  return joint;
}

Expected<void> write_trace(const JointTrace& trace, int replicas, const std::string& name,
                           const std::filesystem::path& path) {
  const auto& ranks = trace.ranks;
  std::vector<observe::TraceProcess> processes;
  const std::ptrdiff_t size = std::ssize(ranks) / replicas;
  for (int replica = 0; replica < replicas; ++replica) {
    const auto first = ranks.begin() + replica * size;
    const std::vector<std::vector<StepTrace>> own(first, first + size);
    auto& process = processes.emplace_back();
    process.name = replicas > 1 ? fmt::format("{}, replica {}", name, replica) : name;
    for (std::size_t i = 0; i < own[0].size(); ++i) process.steps.push_back(traced(own, i));
  }
  return write_file_durably(path, observe::trace_json(processes, trace.clocks));
}

observe::LoadTraceWriter::Step load_trace_step(const runtime::StepReport& report,
                                               const runtime::Pipeline& pipeline) {
  return {.step = report.step,
          .frozen_layers = report.frozen_layers,
          .announced = pipeline.announced(),
          .moved = report.moved_layers > 0,
          .profiler = pipeline.profiler(),
          .observed = pipeline.observed(),
          .moving = pipeline.coming_plan() != nullptr};
}

}  // namespace dynmo::train
