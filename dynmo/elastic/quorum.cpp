// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/quorum.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "dynmo/core/fields.h"
#include "dynmo/elastic/control_messages.h"

namespace dynmo::elastic {
namespace {

void add(std::vector<View>& views, const View& view) {
  if (std::ranges::find(views, view) == views.end()) views.push_back(view);
}

}  // namespace

void list_fields(IsA<Standing> auto& standing, auto& visit) {
  visit("open", standing.open);
  visit.optional("dead", standing.dead);
}
Json to_json(const Standing& standing) { return write_list(standing); }
Expected<Standing> parse_standing(const Json& json, std::string_view origin) {
  return parse_fields<Standing>(json, origin);
}

bool is_dead(const Standing& standing, MemberId id) {
  return std::ranges::find(standing.dead, id) != standing.dead.end();
}

void note_dead(Standing& standing, MemberId id) {
  if (!is_dead(standing, id)) standing.dead.push_back(id);
}

void merge(Standing& standing, const Standing& theirs) {
  for (const View& view : theirs.open) add(standing.open, view);
  for (const MemberId id : theirs.dead) note_dead(standing, id);
}

bool has_quorum(const View& of, const View& next, const Standing& standing) {
  int there = 0;
  int with = 0;
  for (const Member& member : of.members) {
    if (is_dead(standing, member.id)) continue;
    ++there;
    if (next.has(member.id)) ++with;
  }
  return 2 * with > there;
}

bool may_form(const View& next, const View& before, const Standing& standing) {
  const auto counts = [&](const View& view) { return has_quorum(view, next, standing); };
  return counts(before) && std::ranges::all_of(standing.open, counts);
}

std::vector<View> open_ends(const std::vector<View>& views, const View& next,
                            const Standing& standing) {
  std::vector<View> open;
  for (const View& view : views) {
    const bool closed = std::ranges::all_of(view.members, [&](const Member& member) {
      return next.has(member.id) || is_dead(standing, member.id);
    });
    if (!closed) add(open, view);
  }
  return open;
}

void note_formed(Standing& standing, const View& next, const View& before) {
  std::vector<View> all = std::exchange(standing.open, {});
  add(all, before);
  standing.open = open_ends(all, next, standing);
  std::erase_if(standing.dead, [&](MemberId id) {
    return std::ranges::none_of(standing.open, [&](const View& view) { return view.has(id); });
  });
}

}  // namespace dynmo::elastic
