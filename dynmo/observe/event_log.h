// SPDX-License-Identifier: Apache-2.0
#pragma once

// RUN/events.jsonl ("dynmo-event-1", docs/formats.md): what a run decided and what happened to it,
// a line each, as it happens: decisions taken and refused with their reasons, moves, changes of
// size, what sources of dynamism changed, validations, checkpoints, its end. Few and small, so each
// is written at once.

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/plan/plan.h"

namespace dynmo::observe {

inline constexpr std::string_view kEventFormat = "dynmo-event-1";

class EventLog {
 public:
  enum class Start { kEmpty, kAppend };  // kAppend: of a run that goes on

  // kBadInput, naming the path.
  [[nodiscard]] static Expected<EventLog> open(const std::filesystem::path& path, Start start);

  // Adds {"event": KIND, "step": STEP, "time_s": now, ...}. `more` is an object, or null. Steps are
  // those that come next: an event between two steps has the second one's number.
  void add(std::string_view kind, std::int64_t step, const Json& more = nullptr);

  // Why lines are missing, once; a log that cannot be written stops nothing.
  [[nodiscard]] std::optional<std::string> take_failure();

 private:
  EventLog(std::filesystem::path path, std::ofstream file)
      : path_(std::move(path)), file_(std::make_unique<std::ofstream>(std::move(file))) {}

  std::filesystem::path path_;
  std::unique_ptr<std::ofstream> file_;
  bool failed_ = false;
  bool told_ = false;
};

struct Event {
  std::string kind;
  std::int64_t step = 0;
  Json json;
  std::string origin;  // file and line

  // Returns 0 where the field is absent, or of another type.
  [[nodiscard]] double number(const char* key) const;
};
// Which lines of a file are read: all, or those that a rank needs which goes on with the log of
// another one: losses, recoveries, and the newest 64 KiB.
enum class EventsOf { kAll, kTakeOver };
// Returns the events of a file in its order; none where there is no file. A last line without its
// newline is what a killed process left half written: it is passed over. kBadInput naming the line.
[[nodiscard]] Expected<std::vector<Event>> read_events(const std::filesystem::path& path,
                                                       EventsOf which = EventsOf::kAll);

// Returns the plan that an event puts in force. (The plan of a decision is put in force by the move
// that follows it.)
[[nodiscard]] Expected<std::optional<plan::Plan>> plan_of(const Event& event);

}  // namespace dynmo::observe
