// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/survivors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "dynmo/core/json.h"

namespace dynmo::train {
namespace {

namespace fs = std::filesystem;

constexpr char kNone = ' ';

// The letter that the system gives a process's state (proc(5)); kNone: there is no such process.
char state_of(std::int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  if (!std::getline(file, text)) return kNone;
  const std::size_t name_end = text.rfind(") ");
  return name_end == std::string::npos || name_end + 2 >= text.size() ? kNone : text[name_end + 2];
}

bool lives(std::int64_t pid) {
  const char state = state_of(pid);
  return state != kNone && state != 'Z' && state != 'X' && state != 'x';
}

}  // namespace

void end_stopped(const elastic::View& members, const std::string& host) {
  std::error_code fault;
  for (const elastic::Member& member : members.members) {
    if (member.host != host || state_of(member.pid) != 'T') continue;
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

std::string text_of(const MeetingCall& call) {
  return Json{{"view", elastic::to_json(call.next)}, {"place", elastic::to_json(call.place)}}
      .dump();
}

Survivors::Survivors(const elastic::Loss& loss, elastic::Member self, Ask ask)
    : before_(loss.before),
      self_(std::move(self)),
      ask_(std::move(ask)),
      replicas_(loss.replicas),
      newest_(std::max(loss.before.generation, loss.generation)),
      heard_(loss.before.generation) {}

elastic::Fate Survivors::fate_of(const elastic::Member& member) const {
  if (member.id == self_.id) return elastic::Fate::kAlive;
  if (member.host != self_.host) return ask_(member).fate;
  return lives(member.pid) ? elastic::Fate::kAlive : elastic::Fate::kDead;
}

std::optional<MeetingCall> Survivors::heard() {
  for (const elastic::Member& member : before_.members) {
    if (member.id == self_.id) break;  // who is above this process does not call it
    if (member.host == self_.host && !lives(member.pid)) continue;
    const elastic::Answer answer = ask_(member);
    if (answer.fate != elastic::Fate::kAlive || answer.notice.empty()) continue;
    const std::string origin = fmt::format("the call of rank {}", member.number);
    const auto json = parse_json(answer.notice, origin);
    if (!json || !json->is_object() || !json->contains("view") || !json->contains("place")) {
      continue;
    }
    auto next = elastic::parse_view((*json)["view"], origin);
    JsonObject object((*json)["place"], origin);
    auto place = elastic::parse_place(object);
    // It may be the call of an earlier loss.
    if (!next || !place || next->members.empty() || next->generation <= heard_ ||
        next->members.front().id != member.id) {
      continue;
    }
    heard_ = next->generation;
    return MeetingCall{.next = *std::move(next), .place = *std::move(place)};
  }
  return std::nullopt;
}

bool Survivors::calls() const {
  for (const elastic::Member& member : before_.members) {
    if (member.id == self_.id) return true;
    if (fate_of(member) != elastic::Fate::kDead) return false;
  }
  return false;
}

std::optional<elastic::View> Survivors::next() {
  elastic::View living;
  for (const elastic::Member& member : before_.members) {
    const elastic::Fate fate = fate_of(member);
    if (fate == elastic::Fate::kSilent) return std::nullopt;
    if (fate == elastic::Fate::kAlive) living.members.push_back(member);
  }
  elastic::View next = as_many_as_divide(std::move(living), before_, replicas_);
  newest_ = std::max(newest_, heard_) + 1;
  heard_ = newest_;  // our own
  next.generation = newest_;
  return next;
}

std::string Survivors::unknown() const {
  std::vector<std::string> all;
  for (const elastic::Member& member : before_.members) {
    if (fate_of(member) != elastic::Fate::kSilent) continue;
    all.push_back(fmt::format("rank {} on host '{}'", member.number, member.host));
  }
  return fmt::format("{}", fmt::join(all, ", "));
}

}  // namespace dynmo::train
