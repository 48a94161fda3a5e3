// SPDX-License-Identifier: Apache-2.0
#pragma once

// The state machine counts these: sets of members, and the views whose quorum a new one must have.

#include <cstdint>
#include <vector>

#include "dynmo/elastic/membership.h"

namespace dynmo::elastic {

// Ascending sets of ids.
[[nodiscard]] bool has(const std::vector<MemberId>& set, MemberId id);
void insert(std::vector<MemberId>& set, MemberId id);
void erase(std::vector<MemberId>& set, MemberId id);

[[nodiscard]] bool in_any(const std::vector<Member>& members, MemberId id);
[[nodiscard]] bool in_any(const std::vector<View>& views, MemberId id);
// Requires that it is among them.
[[nodiscard]] std::int32_t number_of(const std::vector<Member>& members, MemberId id);
[[nodiscard]] std::vector<MemberId> ids_of(const std::vector<Report>& reports);  // ascending
void sort(std::vector<Member>& members);                                         // by number
[[nodiscard]] const Reported* find(const std::vector<Reported>& reports, MemberId id);

// All members of the newest view that is installed, here or in the reports, and of those that were
// tried since, by number.
[[nodiscard]] std::vector<Member> participants(const Standing& standing,
                                               const std::vector<Reported>& reports);

// The report with the newest installed view. Requires one.
[[nodiscard]] const Reported& newest(const std::vector<Reported>& reports);

// The views that could be running or may yet be: the newest that is installed, those before it
// whose left-out members may be alive, and all that were tried since. A try whose members are all
// gone does not count. Only its members and newcomers can have gone on after it, and newcomers
// carry the view that whoever asks now belongs to, of which they have no quorum without it.
[[nodiscard]] std::vector<View> electorates(const std::vector<Reported>& reports,
                                            const std::vector<MemberId>& gone, const Rules& rules);
[[nodiscard]] bool quorum_of_all(const std::vector<View>& electorates,
                                 const std::vector<MemberId>& forming,
                                 const std::vector<MemberId>& gone, const Rules& rules);
// Selects from the views that `installed` was formed from those that may go on without it: somebody
// who is not in `installed` may be alive.
[[nodiscard]] std::vector<View> open_ends(const std::vector<View>& before, const View& installed,
                                          const std::vector<MemberId>& gone);

[[nodiscard]] Losses one_more(const Losses& losses, const std::vector<Report>& reports);

}  // namespace dynmo::elastic
