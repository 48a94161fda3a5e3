// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/event_log.h"

#include <chrono>
#include <string>
#include <system_error>
#include <utility>

#include "dynmo/core/files.h"

namespace dynmo::observe {
namespace {

constexpr std::size_t kNewestBytes = std::size_t{64} << 10;

// Returns whether a line is an event of a loss or a recovery. EventLog writes each key once and
// without blanks, so no parser is needed.
bool tells_of_loss(std::string_view line) {
  return line.find(R"("event":"loss")") != std::string_view::npos ||
         line.find(R"("event":"recovery")") != std::string_view::npos;
}

double wall_time_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

Expected<EventLog> EventLog::open(const std::filesystem::path& path, Start start) {
  DYNMO_ASSIGN(process::LineFile file, process::LineFile::open(path, start));
  return EventLog(std::move(file));
}

void EventLog::add(std::string_view kind, std::int64_t step, const Json& more) {
  Json event = {
      {"format", kEventFormat}, {"event", kind}, {"step", step}, {"time_s", wall_time_s()}};
  if (more.is_object()) event.update(more);
  (void)file_.append(event.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
}

std::optional<std::string> EventLog::take_failure() {
  if (!file_.take_failure()) return std::nullopt;
  return fmt::format("'{}' lacks what comes from here on: it cannot be written",
                     file_.path().string());
}

double Event::number(const char* key) const {
  const auto found = json.find(key);
  return found != json.end() && found->is_number() ? found->get<double>() : 0;
}

Expected<std::vector<Event>> read_events(const std::filesystem::path& path, EventsOf which) {
  std::vector<Event> events;
  std::error_code fault;
  if (!std::filesystem::exists(path, fault)) return events;
  DYNMO_ASSIGN(const std::string text, read_file(path));
  std::size_t at = 0;
  for (int number = 1; at < text.size(); ++number) {
    const std::size_t newline = text.find('\n', at);
    if (newline == std::string::npos) break;  // half written
    const std::string_view line = std::string_view(text).substr(at, newline - at);
    const bool is_new = text.size() - at <= kNewestBytes;
    at = newline + 1;
    if (which == EventsOf::kTakeOver && !is_new && !tells_of_loss(line)) continue;
    std::string origin = fmt::format("{}:{}", path.string(), number);
    DYNMO_ASSIGN(Json event, parse_json(line, origin));
    if (!event.is_object() || !event.contains("event") || !event["event"].is_string() ||
        !event.contains("step") || !event["step"].is_number_integer()) {
      return make_error(ErrorCode::kBadInput, "{}: wanted an event with its step", origin);
    }
    auto kind = event["event"].get<std::string>();
    const auto step = event["step"].get<std::int64_t>();
    events.push_back({std::move(kind), step, std::move(event), std::move(origin)});
  }
  return events;
}

Expected<std::optional<plan::Plan>> plan_of(const Event& event) {
  const auto found = event.json.find("plan");
  if (found == event.json.end() || !found->is_object() || event.kind == "decision") {
    return std::optional<plan::Plan>();
  }
  DYNMO_ASSIGN(plan::Plan plan, plan::parse_plan(*found, event.origin));
  return std::optional(std::move(plan));
}

Json decision_event(const control::Decision& decision) {
  return {{"taken", decision.migrate},
          {"cause", decision.why},
          {"reason", decision.reason},
          {"current_step_s", decision.current_step_s},
          {"planned_step_s", decision.planned_step_s},
          {"gain_s", decision.gain_s},
          {"cost_s", decision.cost_s},
          {"noise_s", decision.noise_s},
          {"ranks_before", decision.ranks_before},
          {"ranks_after", decision.ranks_after},
          {"plan", plan::to_json(decision.plan)}};
}

Json move_event(int layers, Bytes bytes, double seconds, const plan::Plan& plan) {
  return {{"layers", layers},
          {"bytes", bytes.value},
          {"seconds", seconds},
          {"plan", plan::to_json(plan)}};
}

}  // namespace dynmo::observe
