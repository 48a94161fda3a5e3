// SPDX-License-Identifier: Apache-2.0
#pragma once

// Who may go on without others that may still live: more than half of every view that counts, those
// that have ended not counted (docs/decisions/015-views-with-open-ends.md). A group takes no step
// without all its members, and each is in one group at a time; so of two groups that share a member
// one has stopped, and two that may form share one.

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/elastic/member.h"

namespace dynmo::elastic {

// The views that count for a member, besides the one in force.
struct Standing {
  std::vector<View> open = {};      // before it: somebody who was left out may be alive
  std::vector<MemberId> dead = {};  // members of views that count, for certain
  friend bool operator==(const Standing&, const Standing&) = default;
};
[[nodiscard]] Json to_json(const Standing& standing);
[[nodiscard]] Expected<Standing> parse_standing(const Json& json, std::string_view origin);

[[nodiscard]] bool is_dead(const Standing& standing, MemberId id);
void note_dead(Standing& standing, MemberId id);
// Adds all that `theirs` knows; a view once.
void merge(Standing& standing, const Standing& theirs);

// Whether `next` has more than half of the members of a view that may be alive.
[[nodiscard]] bool has_quorum(const View& of, const View& next, const Standing& standing);
// The same of all views that count, where `before` is in force.
[[nodiscard]] bool may_form(const View& next, const View& before, const Standing& standing);
// Selects of `views` those of which somebody who is not in `next` may be alive.
[[nodiscard]] std::vector<View> open_ends(const std::vector<View>& views, const View& next,
                                          const Standing& standing);
// `next` is in force, which its members have formed from `before`.
void note_formed(Standing& standing, const View& next, const View& before);

}  // namespace dynmo::elastic
