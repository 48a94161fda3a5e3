// SPDX-License-Identifier: Apache-2.0
#pragma once

// Pairs of sources of dynamism that exclude each other in a training, and settings that exclude a
// source. One table serves a check before a rank starts, a page of the docs, and a test for each
// cell. Exclusions by a source's own options (freezing.rule with a device) are checked with the
// options.

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

// Returns the refused pairs of tables. All other pairs work together. docs/sources.md lists them.
[[nodiscard]] std::span<const RefusedPair> refused_pairs();

// A setting of a run that excludes a source. `key` is that of a config, and `value` its value
// there.
struct RefusedSetting {
  std::string_view source;
  std::string_view key;
  std::string_view value;
  std::string_view reason;
};

// Returns the refused settings. All others work with every source, whatever its options.
[[nodiscard]] std::span<const RefusedSetting> refused_settings();

// Checks a combination. Returns kBadInput with the first refused pair among `tables`, else the
// first source that the setting excludes. The message has the reason and what to disable.
[[nodiscard]] Expected<void> check_combination(std::span<const std::string_view> tables,
                                               const TrainingSetting& setting);

}  // namespace dynmo::dynamism
