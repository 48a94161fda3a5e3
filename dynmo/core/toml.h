// SPDX-License-Identifier: Apache-2.0
#pragma once

// Configs as TOML. A config is a plain struct of defaults and one list of its keys. From this list
// a file is read, a flag is applied, the resolved form is saved, and the nearest key is named.
// Errors name the place (file and line, or the flag) and the key.

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

// Fields in seconds, and in bytes a second. TOML has the number, or text with a unit ("20us",
// "50GB/s"). A bandwidth may be inf.
struct TomlSeconds {
  double* field = nullptr;
};
struct TomlBandwidth {
  double* field = nullptr;
};

// A number, or in TOML "auto" for nullopt. Then the program chooses one.
struct TomlAuto {
  std::optional<double>* field = nullptr;
};

// A field that is an enum. Its enumerators count from 0 in the order of `names`.
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

// A field that is an array of tables, such as [[event]]. Each has its own keys.
struct TomlTables {
  std::function<void()> clear;
  std::function<std::vector<TomlKey>()> add;               // adds one with defaults
  std::function<std::vector<std::vector<TomlKey>>()> all;  // existing ones
};

// A std::optional<bool> is not written if it has no value.
using TomlField =
    std::variant<int*, std::int64_t*, double*, bool*, std::optional<bool>*, std::string*,
                 std::vector<std::int64_t>*, std::vector<std::string>*, Bytes*, TomlSeconds,
                 TomlBandwidth, TomlAuto, TomlChoice, TomlTables>;

// A condition under which a key has an effect (core/effects.h makes and checks them). It holds if
// `key` has one of the values `is`, or if one of `or_if` holds. Without a `key`, `holds` decides
// instead of `is`.
struct ActsIf {
  std::string key = {};            // another key of the list
  Allowed is = {};                 // allowed values of `key`
  std::string wanted = {};         // what a message asks for; default: `key` = `is`
  bool holds = false;              // without a `key`
  std::string now = {};            // what a message says if it does not hold
  std::vector<ActsIf> or_if = {};  // alternatives
};

// `name` is dotted, "table.key". Keys of one table follow one another. The field outlives its use.
struct TomlKey {
  std::string name;
  TomlField field;
  Allowed allowed = {};
  std::vector<ActsIf> acts_if = {};  // required conditions
  std::string help = {};             // one line, for pages and messages
  // Reason why this key cannot be set here, or "". A key with a reason is not written either.
  std::string refused = {};
};

// Maximum size of a config's text.
inline constexpr std::size_t kMaxTomlBytes = std::size_t{1} << 20;

// Sets the fields that `text` names. `origin` is the file's name. The text may have any bytes.
// Returns kBadInput with origin and line for bad TOML, a value of another type, or an unknown key
// (with the nearest one). The fields before the fault are then already set.
[[nodiscard]] Expected<void> apply_toml(std::span<const TomlKey> keys, std::string_view text,
                                        std::string_view origin);

// Sets fields by "table.key=value" texts. The value is TOML, or a string without quotes. `example`
// is a valid setting, for messages. Fails like apply_toml().
[[nodiscard]] Expected<void> apply_toml_settings(std::span<const TomlKey> keys,
                                                 std::span<const std::string> settings,
                                                 std::string_view example);

// Checks that each key allows its value. Returns kBadInput with key, value and the allowed values
// for the first that does not.
[[nodiscard]] Expected<void> check_values(std::span<const TomlKey> keys);

// Returns all fields as TOML, table by table. apply_toml() reads it back to the same values.
[[nodiscard]] std::string to_toml(std::span<const TomlKey> keys);

[[nodiscard]] std::string toml_value(const TomlField& field);

// Returns a field's value for check_allowed(), or nullopt for types without allowed values.
[[nodiscard]] std::optional<AllowedValue> limited_value(const TomlField& field);

}  // namespace dynmo
