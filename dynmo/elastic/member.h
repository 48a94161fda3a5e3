// SPDX-License-Identifier: Apache-2.0
#pragma once

// The members of a run, and the views that they form one after another.

#include <algorithm>
#include <compare>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/ids.h"

namespace dynmo::elastic {

// A random number that a process draws when it enters. A process that was left out and returns is
// another member and draws a new one. 0 is no member.
struct MemberId {
  std::uint64_t value = 0;
  friend constexpr auto operator<=>(MemberId, MemberId) = default;
};

struct Member {
  MemberId id;
  // Number for the user and for files: 0 to P - 1 at the start, and counting up for joiners. The
  // member with the lowest number leads.
  std::int32_t number = 0;
  // Host as the process names it: the unit that a job manager takes back.
  std::string host = {};
  std::int64_t pid = 0;
  // Names the process ids that `pid` is one of (process/ending.h). Machines or containers may have
  // equal host names and different processes.
  std::string processes = {};
  std::string address = {};  // HOST:PORT of its control listener
  friend bool operator==(const Member&, const Member&) = default;
};

// Returns whether the process of `other` is in /proc as `self` reads it.
[[nodiscard]] inline bool sees_process(const Member& self, const Member& other) {
  return self.host == other.host && self.processes == other.processes;
}

// The members of one group, by ascending number. The first is world rank 0.
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

// The fate of another process of the run, which may be on another host, as far as a process knows
// it.
enum class Fate : std::uint8_t {
  kAlive,
  kSilent,  // longer than the limit; it may be alive
  kDead,    // certain and final
};

}  // namespace dynmo::elastic

template <>
struct std::hash<dynmo::elastic::MemberId> {
  std::size_t operator()(dynmo::elastic::MemberId id) const noexcept {
    return std::hash<std::uint64_t>{}(id.value);
  }
};
