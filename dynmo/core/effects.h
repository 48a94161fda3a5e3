// SPDX-License-Identifier: Apache-2.0
#pragma once

// A key that is given has an effect, or it is refused by name. The condition under which it acts
// stands beside the key (TomlKey::acts_if); checks, messages and pages follow it.

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/toml.h"

namespace dynmo {

// The condition that the key `key` has one of the values `is`; true and false are names.
[[nodiscard]] ActsIf when(std::string key, Allowed is, std::string wanted = {});
// The condition that the text or the list `key` is not empty.
[[nodiscard]] ActsIf when_given(std::string key, std::string wanted);
// The condition that the text or the list `key` is empty.
[[nodiscard]] ActsIf when_empty(std::string key);
// The condition `holds`, for what one key alone does not say. `now` is what a message says where it
// does not hold, `wanted` what it asks for then.
[[nodiscard]] ActsIf when_so(bool holds, std::string now, std::string wanted);
[[nodiscard]] ActsIf either(ActsIf one, ActsIf other);
// Adds `conditions` before those that the keys have.
[[nodiscard]] std::vector<TomlKey> only_if(const std::vector<ActsIf>& conditions,
                                           std::vector<TomlKey> keys);

// "pipeline.schedule = interleaved or auto"; on pages "pipeline.schedule=interleaved/auto", and
// "checkpoint.every>=1".
[[nodiscard]] std::string text_of(const ActsIf& condition);
[[nodiscard]] std::string page_text_of(const ActsIf& condition);

// Returns kBadInput for the first key that is not at its default and has no effect beside the
// others: the line says what was given, what makes it idle, and what to change. `defaults` is the
// same list over the fields of a default object.
[[nodiscard]] Expected<void> check_effects(std::span<const TomlKey> keys,
                                           std::span<const TomlKey> defaults);
// Sets the keys that have no effect to their defaults.
void reset_idle(std::span<const TomlKey> keys, std::span<const TomlKey> defaults);

// Like apply_toml_settings(). A key that had an effect before and loses it by the settings goes
// back to its default, unless one of them names it: a flag that switches a table of a file off is
// enough. `make_keys` lists the keys with the conditions of the values at that time.
[[nodiscard]] Expected<void> apply_overrides(const std::function<std::vector<TomlKey>()>& make_keys,
                                             std::span<const TomlKey> defaults,
                                             std::span<const std::string> settings,
                                             std::string_view example);

}  // namespace dynmo
