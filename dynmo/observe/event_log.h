// SPDX-License-Identifier: Apache-2.0
#pragma once

// RUN/events.jsonl ("dynmo-event-1", docs/formats.md) has the events of a run, one on each line.
// They are decisions taken and refused with their reasons, moves, and changes of size. Others are
// changes of sources of dynamism, validations, checkpoints, and the run's end. Events are few and
// small, so each is written at once.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/control/policy.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"
#include "dynmo/plan/plan.h"
#include "dynmo/process/append_file.h"

namespace dynmo::observe {

inline constexpr std::string_view kEventFormat = "dynmo-event-1";

class EventLog {
 public:
  using Start = process::LineFile::Start;  // kAppend if a run continues

  // Opens the log. Returns kBadInput with the path.
  [[nodiscard]] static Expected<EventLog> open(const std::filesystem::path& path, Start start);

  // Adds {"event": KIND, "step": STEP, "time_s": now, ...}. `more` is an object, or null. An event
  // between two steps has the number of the second one.
  void add(std::string_view kind, std::int64_t step, const Json& more = nullptr);

  // Returns why lines are missing, on the first call after a failure. A log that cannot be written
  // does not end the run.
  [[nodiscard]] std::optional<std::string> take_failure();

 private:
  explicit EventLog(process::LineFile file) : file_(std::move(file)) {}

  process::LineFile file_;
};

struct Event {
  std::string kind;
  std::int64_t step = 0;
  Json json;
  std::string origin;  // file and line

  // Returns the field `key`, or 0 if it is absent or of another type.
  [[nodiscard]] double number(const char* key) const;
};
// Selects the lines of a file that are read. A rank that continues another rank's log needs losses,
// recoveries, and the newest 64 KiB.
enum class EventsOf { kAll, kTakeOver };
// Returns the events of a file in their order, or none if there is no file. Ignores a last line
// without its newline, which a killed process left half written. Returns kBadInput with the line.
[[nodiscard]] Expected<std::vector<Event>> read_events(const std::filesystem::path& path,
                                                       EventsOf which = EventsOf::kAll);

// Returns the plan that is in force from an event on, if it starts one. A decision starts none: the
// move after it does. Fails with kBadInput if that plan is not valid.
[[nodiscard]] Expected<std::optional<plan::Plan>> plan_of(const Event& event);

// Returns the fields of events of kind "decision" and "move" (docs/formats.md).
[[nodiscard]] Json decision_event(const control::Decision& decision);
[[nodiscard]] Json move_event(int layers, Bytes bytes, double seconds, const plan::Plan& plan);

}  // namespace dynmo::observe
