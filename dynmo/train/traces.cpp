// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/traces.h"

#include <cstring>

#include "dynmo/core/files.h"
#include "dynmo/observe/trace.h"
#include "dynmo/transport/gather.h"

namespace dynmo::train {
namespace {

static_assert(std::is_trivially_copyable_v<schedule::TimedAction>);

// Ranks are of one build: the bytes of the values are the format.
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

std::string encode(const std::deque<StepTrace>& steps) {
  std::string bytes;
  for (const StepTrace& step : steps) {
    put(bytes, step.step);
    put(bytes, step.start_ns);
    put(bytes, static_cast<std::uint64_t>(step.actions.size()));
    for (const schedule::TimedAction& action : step.actions) put(bytes, action);
  }
  return bytes;
}

std::vector<StepTrace> decode(std::string_view bytes) {
  std::vector<StepTrace> steps;
  while (!bytes.empty()) {
    StepTrace step;
    step.step = take<std::int64_t>(bytes);
    step.start_ns = take<std::int64_t>(bytes);
    const auto count = take<std::uint64_t>(bytes);
    for (std::uint64_t i = 0; i < count; ++i)
      step.actions.push_back(take<schedule::TimedAction>(bytes));
    steps.push_back(std::move(step));
  }
  return steps;
}

}  // namespace

Expected<void> write_trace(transport::Transport& transport, transport::Tag tag,
                           const std::deque<StepTrace>& mine, const std::filesystem::path& path) {
  DYNMO_ASSIGN(const auto texts, transport::gather_texts(transport, tag, encode(mine)));
  if (transport.rank() != Rank(0) || mine.empty()) return {};
  std::vector<std::vector<StepTrace>> ranks;
  for (const std::string& text : texts) ranks.push_back(decode(text));
  observe::TraceProcess process{.name = "measured", .steps = {}};
  for (std::size_t i = 0; i < ranks[0].size(); ++i) {
    // One clock for the step: every rank's actions relative to the first rank to start.
    std::int64_t start = ranks[0][i].start_ns;
    for (const auto& rank : ranks) start = std::min(start, rank[i].start_ns);
    observe::TracedStep step{.step = ranks[0][i].step, .timeline = {}};
    for (const auto& rank : ranks) {
      const Nanoseconds shift{rank[i].start_ns - start};
      step.timeline.ranks.push_back(rank[i].actions);
      for (schedule::TimedAction& action : step.timeline.ranks.back()) {
        action.start += shift;
        action.end += shift;
      }
    }
    process.steps.push_back(std::move(step));
  }
  return write_file_durably(path, observe::trace_json(std::span(&process, 1)));
}

}  // namespace dynmo::train
