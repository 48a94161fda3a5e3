// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the files of Resizing share: resizing.cpp has what is asked for, changing.cpp how a group
// follows another, leading.cpp what the leader alone does.

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/elastic/control_messages.h"
#include "dynmo/observe/table.h"
#include "dynmo/train/resizing.h"

namespace dynmo::train {

inline constexpr std::chrono::milliseconds kLastHooks{20000};  // for hooks when the leader ends

[[nodiscard]] inline std::vector<int> numbers_of(const elastic::View& view) {
  std::vector<int> numbers;
  for (const elastic::Member& member : view.members) numbers.push_back(member.number);
  return numbers;
}

[[nodiscard]] inline elastic::Reply done(std::string text) {
  return {.done = true, .text = std::move(text)};
}

[[nodiscard]] inline std::string ranks_text(int ranks, std::int64_t replicas) {
  return replicas > 1 ? fmt::format("{} x {} ranks", replicas, ranks)
                      : observe::format_count(ranks, "rank");
}

}  // namespace dynmo::train
