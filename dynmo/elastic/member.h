// SPDX-License-Identifier: Apache-2.0
#pragma once

// Who takes part in a run: members, and the views they form one after another.

#include <algorithm>
#include <compare>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/ids.h"

namespace dynmo::elastic {

// Drawn at random by a process that enters. A process that was left out and comes again is another
// member: it draws a new one. 0 is nobody.
struct MemberId {
  std::uint64_t value = 0;
  friend constexpr auto operator<=>(MemberId, MemberId) = default;
};

struct Member {
  MemberId id;
  // For people and for files: 0 to P - 1 at the start, joiners go on counting. The lowest leads.
  std::int32_t number = 0;
  std::string host = {};  // as the process names it: the unit that a job manager takes back
  std::int64_t pid = 0;
  std::string address = {};  // of its control listener, HOST:PORT
  friend bool operator==(const Member&, const Member&) = default;
};

// The members of one group, by ascending number: the first is world rank 0.
struct View {
  Generation generation = 0;  // 0: no view
  std::vector<Member> members = {};

  [[nodiscard]] int size() const { return static_cast<int>(members.size()); }
  [[nodiscard]] const Member* find(MemberId id) const {
    const auto found = std::find_if(members.begin(), members.end(),
                                    [&](const Member& member) { return member.id == id; });
    return found == members.end() ? nullptr : &*found;
  }
  [[nodiscard]] bool has(MemberId id) const { return find(id) != nullptr; }
  [[nodiscard]] std::optional<WorldRank> rank_of(MemberId id) const {
    const Member* member = find(id);
    if (member == nullptr) return std::nullopt;
    return WorldRank(static_cast<std::int32_t>(member - members.data()));
  }
  friend bool operator==(const View&, const View&) = default;
};

// One process knows this of another one of the run, which may be on another host.
enum class Fate : std::uint8_t {
  kAlive,
  kSilent,  // for longer than the limit: it may be alive
  kDead,    // for certain, and for ever
};

}  // namespace dynmo::elastic

template <>
struct std::hash<dynmo::elastic::MemberId> {
  std::size_t operator()(dynmo::elastic::MemberId id) const noexcept {
    return std::hash<std::uint64_t>{}(id.value);
  }
};
