// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/survivors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <future>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "dynmo/core/fields.h"
#include "dynmo/process/ending.h"

namespace dynmo::elastic {
namespace {

namespace fs = std::filesystem;

bool lives(std::int64_t pid) {
  const char state = process::state_of(static_cast<pid_t>(pid));
  return state != ' ' && state != 'X';
}

}  // namespace

void end_stopped(const View& members, const Member& self) {
  std::error_code fault;
  for (const Member& member : members.members) {
    const auto pid = static_cast<pid_t>(member.pid);
    if (!sees_process(self, member) || process::state_of(pid) != 'T') continue;
    // Another process may have that number now.
    const fs::path theirs = fs::read_symlink(fmt::format("/proc/{}/exe", member.pid), fault);
    if (fault || theirs != fs::read_symlink("/proc/self/exe", fault) || fault) continue;
    ::kill(pid, SIGKILL);
  }
}

View as_many_as_divide(View living, const View& before, int replicas) {
  const int positions = before.size() / replicas;
  const auto position = [&](const Member& member) {
    return before.rank_of(member.id)->value % positions;
  };
  std::vector<Member>& members = living.members;
  while (living.size() % replicas != 0) {
    const auto spare = std::find_if(members.rbegin(), members.rend(), [&](const auto& member) {
      return std::ranges::count(members, position(member), position) > 1;
    });
    members.erase(spare == members.rend() ? members.end() - 1 : spare.base() - 1);
  }
  return living;
}

bool MeetingCall::spares_member(MemberId id) const {
  return std::ranges::find(spares, id) != spares.end();
}

namespace {

std::optional<MeetingCall> parse_call(const std::string& text, const std::string& origin) {
  const auto json = parse_json(text, origin);
  if (!json) return std::nullopt;
  JsonObject object(*json, origin);
  FieldReader read(object);
  std::optional<MeetingCall> call(std::in_place);
  read("view", call->next);
  const Json* place = object.value("place");
  call->waits = place != nullptr && place->is_null();
  if (!call->waits) read("place", call->place);
  read("spares", call->spares);
  read("dead", call->dead);
  if (!object.finish() || call->next.members.empty()) call.reset();
  return call;
}

}  // namespace

std::string text_of(const MeetingCall& call) {
  Json json = Json::object();
  FieldWriter write(json);
  write("view", call.next);
  json["place"] = call.waits ? Json() : to_json(call.place);
  write("spares", call.spares);
  write("dead", call.dead);
  return json.dump();
}

Survivors::Survivors(const Loss& loss, Member self, Ask ask, Standing& standing,
                     Clock::duration patience)
    : before_(loss.before),
      self_(std::move(self)),
      ask_(std::move(ask)),
      standing_(standing),
      patience_(patience),
      replicas_(loss.replicas),
      newest_(std::max(loss.before.generation, loss.generation)),
      heard_(loss.before.generation) {}

void Survivors::note(const Member& member, Answer answer, Clock::time_point now) {
  if (answer.fate == Fate::kDead) note_dead(standing_, member.id);
  if (answer.fate == Fate::kSilent) {
    seen_.silent_since.try_emplace(member.id, now);
  } else {
    if (answer.fate == Fate::kAlive && is_given_up(member)) seen_.back = now;
    seen_.silent_since.erase(member.id);
  }
  seen_.answers[member.id] = std::move(answer);
}

void Survivors::look(Clock::time_point now) {
  seen_.now = now;
  std::vector<Member> all = before_.members;
  for (const View& view : standing_.open) {
    for (const Member& member : view.members) {
      if (asks_all_ && !before_.has(member.id)) all.push_back(member);
    }
  }
  // If a member is silent, each answer may take long.
  const auto how = seen_.silent_since.empty() ? std::launch::deferred : std::launch::async;
  // Members whose processes it sees are asked only if they are below it and may call it. After a
  // call all are asked: a newcomer may have left the group while its process lives.
  const bool was_called = heard_ > before_.generation;
  bool below = true;
  std::vector<std::pair<const Member*, std::future<Answer>>> asked;
  for (const Member& member : all) {
    if (member.id == self_.id) below = false;
    if (member.id == self_.id || is_dead(standing_, member.id)) continue;
    if (sees_process(self_, member) && !lives(member.pid)) {
      note(member, {.fate = Fate::kDead}, now);
    } else if (sees_process(self_, member) && !below && !was_called) {
      note(member, {.fate = Fate::kAlive}, now);
    } else {
      asked.emplace_back(&member, std::async(how, ask_, member));
    }
  }
  for (auto& [member, answer] : asked) {
    Answer given = answer.get();
    // A process of this host that does not answer lives. A refusal is certain there, too.
    if (sees_process(self_, *member) && given.fate == Fate::kSilent) given.fate = Fate::kAlive;
    note(*member, std::move(given), now);
  }
}

Fate Survivors::fate_of(const Member& member) const {
  if (member.id == self_.id) return Fate::kAlive;
  if (is_dead(standing_, member.id)) return Fate::kDead;
  const auto found = seen_.answers.find(member.id);
  return found == seen_.answers.end() ? Fate::kSilent : found->second.fate;
}

bool Survivors::is_given_up(const Member& member) const {
  const auto since = seen_.silent_since.find(member.id);
  return since != seen_.silent_since.end() &&
         seen_.now - std::max(since->second, seen_.back) >= patience_;
}

// Returns whether `next` has a quorum. If not, later looks also ask members of earlier views, which
// may have ended.
bool Survivors::may_form(const View& next) {
  const bool may = elastic::may_form(next, before_, standing_);
  asks_all_ = asks_all_ || !may;
  return may;
}

std::optional<MeetingCall> Survivors::heard() {
  bool below = true;  // only a member below this process calls it
  for (const Member& member : before_.members) {
    if (member.id == self_.id) below = false;
    const auto answer = seen_.answers.find(member.id);
    if (answer == seen_.answers.end() || answer->second.fate != Fate::kAlive) continue;
    auto call =
        parse_call(answer->second.notice, fmt::format("the call of rank {}", member.number));
    // Ignores the call of an earlier loss.
    if (!call || call->next.generation <= before_.generation || !call->next.has(member.id)) {
      continue;
    }
    const bool leaves = call->waits ? call->spares_member(self_.id) : !call->next.has(self_.id);
    if (leaves) return call;
    if (!below || call->waits || call->next.generation <= heard_ ||
        call->next.members.front().id != member.id) {
      continue;
    }
    for (const MemberId id : call->dead) note_dead(standing_, id);
    if (!may_form(call->next)) continue;
    heard_ = call->next.generation;
    return call;
  }
  return std::nullopt;
}

std::optional<MeetingCall> Survivors::call() {
  View living;
  bool all_known = true;
  bool below = true;
  for (const Member& member : before_.members) {
    if (member.id == self_.id) below = false;
    const Fate fate = fate_of(member);
    if (fate == Fate::kAlive && below) return std::nullopt;
    if (fate == Fate::kAlive) living.members.push_back(member);
    if (fate != Fate::kSilent) continue;
    if (!is_given_up(member)) return std::nullopt;
    all_known = false;
  }
  MeetingCall call{.next = as_many_as_divide(living, before_, replicas_)};
  call.next.generation = std::max(newest_, heard_) + 1;
  if (call.next.members.empty()) return all_known ? std::optional(call) : std::nullopt;
  Standing without_spares = standing_;
  for (const Member& member : living.members) {
    if (call.next.has(member.id)) continue;
    call.spares.push_back(member.id);
    note_dead(without_spares, member.id);
  }
  call.dead = standing_.dead;
  const auto have_left = [&](MemberId id) { return !living.has(id); };
  std::ranges::copy_if(dismissed_, std::back_inserter(call.spares), have_left);
  if (may_form(call.next)) {
    newest_ = heard_ = call.next.generation;
    return call;
  }
  call.waits = elastic::may_form(call.next, before_, without_spares);
  if (!call.waits) return std::nullopt;
  dismissed_ = call.spares;
  return call;
}

std::optional<Error> Survivors::misses(const View& next) const {
  for (const Member& member : next.members) {
    if (member.id == self_.id) continue;
    if (is_dead(standing_, member.id) || (sees_process(self_, member) && !lives(member.pid))) {
      return make_error(ErrorCode::kPeerLost, "rank {} was lost: its process has ended",
                        member.number);
    }
    if (is_given_up(member)) {
      return make_error(ErrorCode::kPeerLost, "rank {} was lost: it does not answer",
                        member.number);
    }
  }
  return std::nullopt;
}

std::string Survivors::unknown() const {
  std::vector<std::string> all;
  const auto add = [&](const Member& member) {
    if (fate_of(member) != Fate::kSilent) return;
    all.push_back(fmt::format("rank {} on host '{}'", member.number, member.host));
  };
  for (const Member& member : before_.members) add(member);
  for (const View& view : standing_.open) {
    for (const Member& member : view.members) {
      if (!before_.has(member.id)) add(member);
    }
  }
  return fmt::format("{}", fmt::join(all, ", "));
}

}  // namespace dynmo::elastic
