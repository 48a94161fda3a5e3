// SPDX-License-Identifier: Apache-2.0
#pragma once

// The sources of dynamism of one training may exclude each other, and settings of the run. One
// table, for a check before a rank starts, for the page that shows it and for a test a cell. What a
// source's own options exclude (freezing.rule with a device) is checked beside them.

#include <span>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/source_entry.h"

namespace dynmo::dynamism {

struct RefusedPair {
  std::string_view one;
  std::string_view other;
  std::string_view reason;
};

// The refused pairs, as tables; all other pairs work together. In docs/sources.md.
[[nodiscard]] std::span<const RefusedPair> refused_pairs();

// `key` is that of a config, and its value written as a config has it.
struct RefusedSetting {
  std::string_view source;
  std::string_view key;
  std::string_view value;
  std::string_view reason;
};

// Everything else goes with every source, whatever its options.
[[nodiscard]] std::span<const RefusedSetting> refused_settings();

// kBadInput naming the first refused pair among `tables`, else the first one that does not go with
// the setting, with the reason and what to switch off.
[[nodiscard]] Expected<void> check_combination(std::span<const std::string_view> tables,
                                               const TrainingSetting& setting);

}  // namespace dynmo::dynamism
