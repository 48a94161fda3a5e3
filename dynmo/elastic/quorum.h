// SPDX-License-Identifier: Apache-2.0
#pragma once

// Decides which members may continue without others that may still live: more than half of every
// view that counts. Members that have ended do not count
// (docs/decisions/015-views-with-open-ends.md).
//
// A group takes no step without all its members, and each member is in one group at a time. So if
// two groups share a member, one has stopped. Any two groups that may form share a member.

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/elastic/member.h"

namespace dynmo::elastic {

// The views that count for a member, in addition to the view in force.
struct Standing {
  // Earlier views. A member that was left out of one may be alive.
  std::vector<View> open = {};
  std::vector<MemberId> dead = {};  // members of these views that have certainly ended
  friend bool operator==(const Standing&, const Standing&) = default;
};
[[nodiscard]] Json to_json(const Standing& standing);
[[nodiscard]] Expected<Standing> parse_standing(const Json& json, std::string_view origin);

[[nodiscard]] bool is_dead(const Standing& standing, MemberId id);
void note_dead(Standing& standing, MemberId id);
// Adds all that `theirs` knows. A view is added once.
void merge(Standing& standing, const Standing& theirs);

// Returns whether `next` has more than half of the members of view `of` that may be alive.
[[nodiscard]] bool has_quorum(const View& of, const View& next, const Standing& standing);
// Returns whether `next` has a quorum of all views that count, if `before` is in force.
[[nodiscard]] bool may_form(const View& next, const View& before, const Standing& standing);
// Returns the views that have a member which may be alive and is not in `next`.
[[nodiscard]] std::vector<View> open_ends(const std::vector<View>& views, const View& next,
                                          const Standing& standing);
// Notes that `next` is in force, which its members have formed from `before`.
void note_formed(Standing& standing, const View& next, const View& before);

}  // namespace dynmo::elastic
