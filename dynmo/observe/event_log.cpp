// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/event_log.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "dynmo/core/files.h"

namespace dynmo::observe {
namespace {

double wall_time_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

Expected<EventLog> EventLog::open(const std::filesystem::path& path, Start start) {
  if (start == Start::kAppend) DYNMO_TRY(cut_torn_line(path));
  errno = 0;
  if (start == Start::kEmpty) std::ofstream(path, std::ios::trunc);
  std::ofstream file(path, std::ios::app);  // also behind what another leader adds
  if (!file) {
    return make_error(ErrorCode::kBadInput, "cannot write '{}': {}", path.string(),
                      std::strerror(errno));
  }
  return EventLog(path, std::move(file));
}

void EventLog::add(std::string_view kind, std::int64_t step, const Json& more) {
  if (failed_) return;
  Json event = {
      {"format", kEventFormat}, {"event", kind}, {"step", step}, {"time_s", wall_time_s()}};
  if (more.is_object()) event.update(more);
  *file_ << event.dump(-1, ' ', false, Json::error_handler_t::replace) << '\n' << std::flush;
  failed_ = !*file_;
}

std::optional<std::string> EventLog::take_failure() {
  if (!failed_ || std::exchange(told_, true)) return std::nullopt;
  return fmt::format("'{}' lacks what comes from here on: it cannot be written", path_.string());
}

}  // namespace dynmo::observe
