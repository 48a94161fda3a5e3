// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which sources of dynamism one training can have together: one table, for a check before a rank
// starts and for the page that shows it.

#include <span>
#include <string_view>

#include "dynmo/core/expected.h"

namespace dynmo::dynamism {

struct RefusedPair {
  std::string_view one;
  std::string_view other;
  std::string_view reason;
};

// By tables; all other pairs work together. In docs/sources.md.
[[nodiscard]] std::span<const RefusedPair> refused_pairs();

// kBadInput naming the first refused pair among `tables`, its reason and what to switch off.
[[nodiscard]] Expected<void> check_combination(std::span<const std::string_view> tables);

}  // namespace dynmo::dynamism
