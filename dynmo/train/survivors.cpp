// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/survivors.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>
#include <system_error>

#include "dynmo/core/files.h"
#include "dynmo/elastic/job_file.h"

namespace dynmo::train {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMaxCall = std::size_t{1} << 20;
constexpr char kNone = ' ';

// The letter that the system gives a process's state (proc(5)); kNone: there is no such process.
char state_of(std::int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  if (!std::getline(file, text)) return kNone;
  const std::size_t name_end = text.rfind(") ");
  return name_end == std::string::npos || name_end + 2 >= text.size() ? kNone : text[name_end + 2];
}

}  // namespace

bool lives(const elastic::Member& member) {
  const char state = state_of(member.pid);
  return state != kNone && state != 'Z' && state != 'X' && state != 'x';
}

void end_stopped(const elastic::View& members) {
  std::error_code fault;
  for (const elastic::Member& member : members.members) {
    if (state_of(member.pid) != 'T') continue;
    // The number may be another process's by now.
    const fs::path theirs = fs::read_symlink(fmt::format("/proc/{}/exe", member.pid), fault);
    if (fault || theirs != fs::read_symlink("/proc/self/exe", fault) || fault) continue;
    ::kill(static_cast<pid_t>(member.pid), SIGKILL);
  }
}

elastic::View as_many_as_divide(elastic::View living, const elastic::View& before, int replicas) {
  const int positions = before.size() / replicas;
  const auto position = [&](const elastic::Member& member) {
    return before.rank_of(member.id)->value % positions;
  };
  std::vector<elastic::Member>& members = living.members;
  while (living.size() % replicas != 0) {
    const auto spare = std::find_if(members.rbegin(), members.rend(), [&](const auto& member) {
      return std::ranges::count(members, position(member), position) > 1;
    });
    members.erase(spare == members.rend() ? members.end() - 1 : spare.base() - 1);
  }
  return living;
}

bool are_on_host(const elastic::View& view, const std::string& host) {
  return std::ranges::all_of(view.members,
                             [&](const elastic::Member& member) { return member.host == host; });
}

Survivors::Survivors(const elastic::Loss& loss, elastic::MemberId self)
    : before_(loss.before),
      self_(self),
      replicas_(loss.replicas),
      newest_(std::max(loss.before.generation, loss.generation)),
      heard_(loss.before.generation),
      file_(loss.run / "survivors.json") {}

elastic::View Survivors::living() const {
  elastic::View living;
  for (const elastic::Member& member : before_.members) {
    if (member.id == self_ || lives(member)) living.members.push_back(member);
  }
  return living;
}

bool Survivors::calls() const { return living().members.front().id == self_; }

elastic::View Survivors::next() {
  const elastic::View all = living();
  elastic::View next = as_many_as_divide(all, before_, replicas_);
  leaves_some_ = next.size() < all.size();
  newest_ = std::max(newest_, heard_) + 1;
  heard_ = newest_;  // our own
  next.generation = newest_;
  return next;
}

Expected<void> Survivors::tell(const MeetingCall& call) {
  called_ = true;
  const Json json = {{"view", elastic::to_json(call.next)},
                     {"place", elastic::to_json(call.place)}};
  return elastic::write_private(file_, json.dump() + "\n");
}

std::optional<MeetingCall> Survivors::heard() {
  std::error_code fault;
  if (!fs::exists(file_, fault)) return std::nullopt;
  const auto text = read_file(file_, kMaxCall);
  if (!text) return std::nullopt;  // it is over just now
  const auto json = parse_json(*text, file_.string());
  if (!json || !json->is_object() || !json->contains("view") || !json->contains("place")) {
    return std::nullopt;
  }
  auto next = elastic::parse_view((*json)["view"], file_.string());
  if (!next || next->members.empty() || next->generation <= heard_) return std::nullopt;
  JsonObject object((*json)["place"], file_.string());
  auto place = elastic::parse_place(object);
  // A call of an earlier loss, or of one that has ended meanwhile.
  if (!place || next->members.front().id == self_ || !lives(next->members.front()) ||
      !before_.has(next->members.front().id)) {
    return std::nullopt;
  }
  heard_ = next->generation;
  called_ = false;
  return MeetingCall{.next = *std::move(next), .place = *std::move(place)};
}

fs::path Survivors::met() const {
  if (!called_) return {};  // the next call may be there already
  if (leaves_some_) return file_;
  std::error_code fault;
  fs::remove(file_, fault);
  return {};
}

}  // namespace dynmo::train
