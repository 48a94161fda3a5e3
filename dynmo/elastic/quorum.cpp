// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <span>

#include "dynmo/core/check.h"
#include "dynmo/elastic/quorum_impl.h"

namespace dynmo::elastic {

bool has(const std::vector<MemberId>& set, MemberId id) {
  return std::find(set.begin(), set.end(), id) != set.end();
}

void insert(std::vector<MemberId>& set, MemberId id) {
  const auto place = std::lower_bound(set.begin(), set.end(), id);
  if (place == set.end() || *place != id) set.insert(place, id);
}

void erase(std::vector<MemberId>& set, MemberId id) { std::erase(set, id); }

bool in_any(const std::vector<Member>& members, MemberId id) {
  return std::any_of(members.begin(), members.end(),
                     [&](const Member& member) { return member.id == id; });
}

bool in_any(const std::vector<View>& views, MemberId id) {
  return std::any_of(views.begin(), views.end(), [&](const View& view) { return view.has(id); });
}

std::int32_t number_of(const std::vector<Member>& members, MemberId id) {
  for (const Member& member : members) {
    if (member.id == id) return member.number;
  }
  DYNMO_CHECK(false, "a member of a view, got {}", id.value);
}

std::vector<MemberId> ids_of(const std::vector<Report>& reports) {
  std::vector<MemberId> ids;
  for (const Report& report : reports) insert(ids, report.member.id);
  return ids;
}

void sort(std::vector<Member>& members) {
  std::sort(members.begin(), members.end(),
            [](const Member& a, const Member& b) { return a.number < b.number; });
}

const Reported* find(const std::vector<Reported>& reports, MemberId id) {
  for (const Reported& reported : reports) {
    if (reported.report.member.id == id) return &reported;
  }
  return nullptr;
}

std::vector<Member> participants(const Standing& standing, const std::vector<Reported>& reports) {
  Generation newest = standing.installed.generation;
  for (const Reported& reported : reports) {
    newest = std::max(newest, reported.standing.installed.generation);
  }
  std::vector<Member> all;
  const auto add = [&](const View& view) {
    if (view.generation < newest) return;
    for (const Member& member : view.members) {
      if (!in_any(all, member.id)) all.push_back(member);
    }
  };
  const auto add_all = [&](const Standing& some) {
    add(some.installed);
    for (const View& view : some.attempts) add(view);
    if (some.installed.generation > 0) return;  // below: what a joiner has its first view from
    for (const View& view : some.earlier) add(view);
  };
  add_all(standing);
  for (const Reported& reported : reports) add_all(reported.standing);
  sort(all);
  return all;
}

MemberId leader(const Membership& membership) {
  const Member* lowest = nullptr;
  const auto look_at = [&](std::span<const View> views) {
    for (const View& view : views) {
      for (const Member& member : view.members) {
        const bool left =
            member.id == membership.self.id ||
            (!has(membership.standing.gone, member.id) && !has(membership.silent, member.id));
        const bool lower = lowest == nullptr || member.number < lowest->number;
        if (left && lower) lowest = &member;
      }
    }
  };
  look_at({&membership.standing.installed, 1});
  look_at(membership.standing.attempts);
  if (membership.standing.installed.generation == 0) look_at(membership.standing.earlier);
  return lowest == nullptr ? MemberId{} : lowest->id;
}

const Reported& newest(const std::vector<Reported>& reports) {
  return *std::max_element(reports.begin(), reports.end(), [](const auto& a, const auto& b) {
    return a.standing.installed.generation < b.standing.installed.generation;
  });
}

std::vector<View> electorates(const std::vector<Reported>& reports,
                              const std::vector<MemberId>& gone, const Rules& rules) {
  const View& installed = newest(reports).standing.installed;
  std::vector<View> all;
  const auto add = [&](const View& view) {
    if (std::find(all.begin(), all.end(), view) == all.end()) all.push_back(view);
  };
  if (installed.generation > 0) add(installed);
  for (const Reported& reported : reports) {
    const Standing& standing = reported.standing;
    if (standing.installed.generation == installed.generation) {
      for (const View& view : standing.earlier) add(view);
    }
    for (const View& view : standing.attempts) {
      const bool ended = std::ranges::all_of(
          view.members, [&](const Member& member) { return has(gone, member.id); });
      if (rules.attempts && view.generation > installed.generation && !ended) add(view);
    }
  }
  return all;
}

bool has_quorum(const View& electorate, const std::vector<MemberId>& forming,
                const std::vector<MemberId>& gone, const Rules& rules) {
  int there = 0;
  int with = 0;
  bool lowest_with = false;
  for (const Member& member : electorate.members) {
    if (has(gone, member.id)) continue;
    const bool forms = has(forming, member.id);
    if (there == 0) lowest_with = forms;
    ++there;
    with += forms ? 1 : 0;
  }
  return 2 * with > there || (there > 0 && 2 * with == there && (lowest_with || !rules.ties));
}

bool quorum_of_all(const std::vector<View>& electorates, const std::vector<MemberId>& forming,
                   const std::vector<MemberId>& gone, const Rules& rules) {
  return !forming.empty() &&
         std::all_of(electorates.begin(), electorates.end(),
                     [&](const View& view) { return has_quorum(view, forming, gone, rules); });
}

std::vector<View> open_ends(const std::vector<View>& before, const View& installed,
                            const std::vector<MemberId>& gone) {
  std::vector<View> open;
  for (const View& view : before) {
    const bool closed = std::all_of(
        view.members.begin(), view.members.end(),
        [&](const Member& member) { return installed.has(member.id) || has(gone, member.id); });
    if (!closed) open.push_back(view);
  }
  return open;
}

Losses one_more(const Losses& losses, const std::vector<Report>& reports) {
  std::int64_t step = 0;
  for (const Report& report : reports) step = std::max(step, report.step);
  return {.step = step, .count = step == losses.step ? losses.count + 1 : 1};
}

}  // namespace dynmo::elastic
