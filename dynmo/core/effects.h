// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks that each flag and each key of a config that is given has an effect. The condition under
// which a key acts is part of it (TomlKey::acts_if). Checks, messages and pages follow it.

#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/toml.h"

namespace dynmo {

// Returns the condition that the key `key` has one of the values `is`. A bool has the names "true"
// and "false".
[[nodiscard]] ActsIf when(std::string key, Allowed is, std::string wanted = {});
// Returns the condition that the text or the list `key` is not empty.
[[nodiscard]] ActsIf when_given(std::string key, std::string wanted);
// Returns the condition that the text or the list `key` is empty.
[[nodiscard]] ActsIf when_empty(std::string key);
// Returns the condition `holds`, which no single key can express. If it is false, a message says
// `now` and asks for `wanted`.
[[nodiscard]] ActsIf when_so(bool holds, std::string now, std::string wanted);
[[nodiscard]] ActsIf either(ActsIf one, ActsIf other);
// Returns the keys with `conditions` before their own.
[[nodiscard]] std::vector<TomlKey> only_if(const std::vector<ActsIf>& conditions,
                                           std::vector<TomlKey> keys);

// Returns the condition as text: "pipeline.schedule = interleaved or auto".
[[nodiscard]] std::string text_of(const ActsIf& condition);
// Returns a short form: "pipeline.schedule=interleaved/auto", or "checkpoint.every>=1".
[[nodiscard]] std::string page_text_of(const ActsIf& condition);

// Returns kBadInput for the first key that is not at its default and has no effect with the other
// values. The message says what was given, what makes it idle, and what to change. `defaults` is
// the same list over the fields of a default object.
[[nodiscard]] Expected<void> check_effects(std::span<const TomlKey> keys,
                                           std::span<const TomlKey> defaults);
// Sets the keys that have no effect to their defaults.
void reset_idle(std::span<const TomlKey> keys, std::span<const TomlKey> defaults);

// Like apply_toml_settings(). If a setting makes another key idle, also resets that key to its
// default, unless a setting names it. So one flag can disable a table of a file. `make_keys`
// returns the keys with the conditions that follow from the current values.
[[nodiscard]] Expected<void> apply_overrides(const std::function<std::vector<TomlKey>()>& make_keys,
                                             std::span<const TomlKey> defaults,
                                             std::span<const std::string> settings,
                                             std::string_view example);

// A flag of a command. `acts` is whether it has an effect, and `wanted` what it needs for that.
struct FlagUse {
  std::string_view flag;
  bool given = false;
  bool acts = false;
  std::string_view wanted;  // "--join RUN"
};

// Returns kBadInput for the first flag that is given and has no effect with the others.
[[nodiscard]] Expected<void> check_flags(std::initializer_list<FlagUse> flags);

}  // namespace dynmo
