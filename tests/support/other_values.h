// SPDX-License-Identifier: Apache-2.0
#pragma once

// Other values for a key of a config, for tests that set every key alone.

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <variant>
#include <vector>

#include "dynmo/core/toml.h"

namespace dynmo {

// Values that the key allows and that are not the one it has, as settings write them; numbers up to
// `most`, so that a test does not become long.
inline std::vector<std::string> other_values(const TomlKey& key, double most = 1e9) {
  std::vector<std::string> candidates;
  if (const auto* names = std::get_if<Names>(&key.allowed)) {
    candidates.assign(names->begin(), names->end());
  } else if (const auto* choice = std::get_if<TomlChoice>(&key.field)) {
    candidates.assign(choice->names.begin(), choice->names.end());
  } else {
    candidates = {"true", "false", "[1]",  "[\"optimal\"]", "gpt2",     "linear",
                  "bf16", "gpipe", "time", "whole",         "some/path"};
    for (const double number : {0.0, 1.0, 2.0, 3.0, 4.0, 7.0, 64.0, 1e5, 0.9, 0.25, 1e-3}) {
      if (number <= most) candidates.push_back(fmt::format("{}", number));
    }
  }
  const std::string now = toml_value(key.field);
  const std::vector<TomlKey> keys = {key};
  const auto set = [&](const std::string& value) {
    return apply_toml_settings(keys, std::vector{key.name + "=" + value}, "a.b=c").has_value();
  };
  std::vector<std::string> values;
  for (const std::string& candidate : candidates) {
    const bool other = set(candidate) && check_values(keys) && toml_value(key.field) != now;
    if (other) values.push_back(candidate);
    static_cast<void>(set(now));
  }
  return values;
}

}  // namespace dynmo
