// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/quorum.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "dynmo/elastic/control_messages.h"

namespace dynmo::elastic {
namespace {

void add(std::vector<View>& views, const View& view) {
  if (std::ranges::find(views, view) == views.end()) views.push_back(view);
}

Json json_of(const std::vector<View>& views) {
  Json all = Json::array();
  for (const View& view : views) all.push_back(to_json(view));
  return all;
}

Expected<std::vector<View>> views_of(const Json& json, std::string_view key,
                                     std::string_view origin) {
  std::vector<View> views;
  const auto found = json.find(key);
  if (found == json.end() || !found->is_array()) {
    return make_error(ErrorCode::kBadInput, "{}: wanted a list '{}'", origin, key);
  }
  for (const Json& each : *found) {
    DYNMO_ASSIGN(View view, parse_view(each, origin));
    views.push_back(std::move(view));
  }
  return views;
}

}  // namespace

Json to_json(const Standing& standing) {
  Json dead = Json::array();
  for (const MemberId id : standing.dead) dead.push_back(id.value);
  return {{"open", json_of(standing.open)}, {"dead", std::move(dead)}};
}

Expected<Standing> parse_standing(const Json& json, std::string_view origin) {
  Standing standing;
  DYNMO_ASSIGN(standing.open, views_of(json, "open", origin));
  for (const Json& id : json.value("dead", Json::array())) {
    if (!id.is_number_unsigned()) {
      return make_error(ErrorCode::kBadInput, "{}: wanted numbers in 'dead'", origin);
    }
    note_dead(standing, {id.get<std::uint64_t>()});
  }
  return standing;
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
