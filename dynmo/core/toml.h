// SPDX-License-Identifier: Apache-2.0
#pragma once

// Configs as TOML. A config is a plain struct of defaults and one list of its keys; reading a file,
// changing a key from the command line, saving the resolved form and naming the nearest key in a
// message all follow that list. Errors name the place (file and line, or the flag) and the key.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "dynmo/core/allowed.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"

namespace dynmo {

// Fields of amounts, in seconds and bytes a second; in TOML a number of those or text with a unit
// ("20us", "50GB/s"; a bandwidth may be inf).
struct TomlSeconds {
  double* field = nullptr;
};
struct TomlBandwidth {
  double* field = nullptr;
};

// A number, or "auto" while there is none: the program chooses one.
struct TomlAuto {
  std::optional<double>* field = nullptr;
};

// A field that is an enum: its enumerators count from 0 in the order of `names`.
struct TomlChoice {
  std::span<const std::string_view> names;
  std::function<std::size_t()> get;
  std::function<void(std::size_t)> set;
};
template <typename Enum>
[[nodiscard]] TomlChoice toml_choice(Enum* field, std::span<const std::string_view> names) {
  return {.names = names,
          .get = [field] { return static_cast<std::size_t>(*field); },
          .set = [field](std::size_t index) { *field = static_cast<Enum>(index); }};
}

struct TomlKey;

// A field that is an array of tables, such as [[event]]; each with keys of its own.
struct TomlTables {
  std::function<void()> clear;
  std::function<std::vector<TomlKey>()> add;               // one more, with defaults
  std::function<std::vector<std::vector<TomlKey>>()> all;  // those there are
};

// An optional is not written while it has no value.
using TomlField =
    std::variant<int*, std::int64_t*, double*, bool*, std::optional<bool>*, std::string*,
                 std::vector<std::int64_t>*, std::vector<std::string>*, Bytes*, TomlSeconds,
                 TomlBandwidth, TomlAuto, TomlChoice, TomlTables>;

// A condition under which a key has an effect (core/effects.h makes and checks them).
struct ActsIf {
  std::string key = {};            // another key of the list, whose value ...
  Allowed is = {};                 // ... is one of these; or no key, and ...
  std::string wanted = {};         // what a message asks for; default: `key` = `is`
  bool holds = false;              // ... whether it holds, as the values are now
  std::string now = {};            // what a message says where it does not
  std::vector<ActsIf> or_if = {};  // one of these holds instead
};

// `name` is dotted, "table.key"; keys of one table follow one another. The field outlives its use.
struct TomlKey {
  std::string name;
  TomlField field;
  Allowed allowed = {};
  std::vector<ActsIf> acts_if = {};  // all of them
  std::string help = {};             // one line, for pages and messages
  std::string refused =
      {};  // why a file cannot set this key here; such a key is not written either
};

// More text than this is no config.
inline constexpr std::size_t kMaxTomlBytes = std::size_t{1} << 20;

// Sets the fields that `text` names; `origin` is the file's name. Takes any bytes. kBadInput with
// origin and line: no TOML, an unknown key (with the nearest known one), a value of another type.
// Fields that precede the fault are set.
[[nodiscard]] Expected<void> apply_toml(std::span<const TomlKey> keys, std::string_view text,
                                        std::string_view origin);

// Sets fields by "table.key=value" texts; the value is TOML, or a string without quotes. `example`
// is one that would do, for messages.
[[nodiscard]] Expected<void> apply_toml_settings(std::span<const TomlKey> keys,
                                                 std::span<const std::string> settings,
                                                 std::string_view example);

// kBadInput naming key, value and the allowed values for the first value that its key does not
// allow.
[[nodiscard]] Expected<void> check_values(std::span<const TomlKey> keys);

// All fields, table by table; apply_toml reads it back to the same values.
[[nodiscard]] std::string to_toml(std::span<const TomlKey> keys);

// One field as TOML.
[[nodiscard]] std::string toml_value(const TomlField& field);

// A field as check_allowed() takes it; nothing for the types that have no ranges.
[[nodiscard]] std::optional<AllowedValue> limited_value(const TomlField& field);

}  // namespace dynmo
