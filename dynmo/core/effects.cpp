// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/effects.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo {
namespace {

Readable empty_text(bool wanted) {
  return [wanted](const std::string& text) -> Expected<void> {
    const bool empty = text.empty() || text == "[]";
    if (empty == wanted) return {};
    return make_error(ErrorCode::kBadInput, "'{}'", text);
  };
}

// Returns the value without the quotes of TOML, as in settings and messages.
std::string plain_value(const TomlField& field) {
  if (const auto* text = std::get_if<std::string*>(&field)) return **text;
  if (const auto* number = std::get_if<double*>(&field)) return fmt::format("{}", **number);
  if (const auto* choice = std::get_if<TomlChoice>(&field)) {
    return std::string(choice->names[choice->get()]);
  }
  return toml_value(field);
}

const TomlKey& find_key(std::span<const TomlKey> keys, const std::string& name) {
  const auto found = std::ranges::find(keys, name, &TomlKey::name);
  DYNMO_CHECK(found != keys.end(), "a condition on a key of the list, got '{}'", name);
  return *found;
}

bool has_wanted_value(const ActsIf& condition, std::span<const TomlKey> keys) {
  const TomlKey& key = find_key(keys, condition.key);
  if (std::holds_alternative<Range>(condition.is)) {
    const auto number = limited_value(key.field);
    return number && check_allowed(key.name, *number, condition.is).has_value();
  }
  return check_allowed(key.name, std::string_view(plain_value(key.field)), condition.is)
      .has_value();
}

bool is_met(const ActsIf& condition, std::span<const TomlKey> keys) {
  if (condition.key.empty() ? condition.holds : has_wanted_value(condition, keys)) return true;
  return std::ranges::any_of(condition.or_if,
                             [&](const ActsIf& other) { return is_met(other, keys); });
}

// Returns the value that breaks the condition, "elastic.enabled = false".
std::string now_text(const ActsIf& condition, std::span<const TomlKey> keys) {
  std::string text = condition.now;
  if (text.empty()) {
    const std::string value = plain_value(find_key(keys, condition.key).field);
    text = fmt::format("{} = {}", condition.key, value.empty() ? "''" : value);
  }
  for (const ActsIf& other : condition.or_if) text += " and " + now_text(other, keys);
  return text;
}

void copy_value(const TomlField& to, const TomlField& from) {
  std::visit(
      [&](const auto& field) {
        using Field = std::decay_t<decltype(field)>;
        const Field& other = std::get<Field>(from);
        if constexpr (std::is_pointer_v<Field>) {
          *field = *other;
        } else if constexpr (std::is_same_v<Field, TomlChoice>) {
          field.set(other.get());
        } else if constexpr (!std::is_same_v<Field, TomlTables>) {
          *field.field = *other.field;
        }
      },
      to);
}

// Returns the first condition that does not hold, or null if the key acts.
const ActsIf* unmet(const TomlKey& key, std::span<const TomlKey> keys) {
  for (const ActsIf& condition : key.acts_if) {
    if (!is_met(condition, keys)) return &condition;
  }
  return nullptr;
}

bool has_same_value(const TomlKey& key, const TomlKey& other) {
  return toml_value(key.field) == toml_value(other.field);
}

}  // namespace

ActsIf when(std::string key, Allowed is, std::string wanted) {
  return {.key = std::move(key), .is = std::move(is), .wanted = std::move(wanted)};
}
ActsIf when_given(std::string key, std::string wanted) {
  return when(std::move(key), empty_text(false), std::move(wanted));
}
ActsIf when_empty(std::string key) {
  std::string wanted = "no " + key;
  return when(std::move(key), empty_text(true), std::move(wanted));
}
ActsIf when_so(bool holds, std::string now, std::string wanted) {
  return {.wanted = std::move(wanted), .holds = holds, .now = std::move(now)};
}
ActsIf either(ActsIf one, ActsIf other) {
  one.or_if.push_back(std::move(other));
  return one;
}

std::vector<TomlKey> only_if(const std::vector<ActsIf>& conditions, std::vector<TomlKey> keys) {
  for (TomlKey& key : keys) {
    key.acts_if.insert(key.acts_if.begin(), conditions.begin(), conditions.end());
  }
  return keys;
}

std::string text_of(const ActsIf& condition) {
  std::string text = condition.wanted;
  if (const auto* names = std::get_if<Names>(&condition.is); text.empty() && names != nullptr) {
    text = fmt::format("{} = {}", condition.key, listed(*names));
  }
  for (const ActsIf& other : condition.or_if) text += " or " + text_of(other);
  return text;
}

std::string page_text_of(const ActsIf& condition) {
  std::string text = condition.wanted;
  if (const auto* names = std::get_if<Names>(&condition.is)) {
    text = fmt::format("{}={}", condition.key, fmt::join(*names, "/"));
  } else if (const auto* range = std::get_if<Range>(&condition.is)) {
    text = range->below_max           ? fmt::format("{}<{}", condition.key, range->max)
           : range->min == range->max ? fmt::format("{}={}", condition.key, range->min)
           : range->above_min         ? fmt::format("{}>{}", condition.key, range->min)
                                      : fmt::format("{}>={}", condition.key, range->min);
  }
  for (const ActsIf& other : condition.or_if) text += " or " + page_text_of(other);
  return text;
}

Expected<void> check_effects(std::span<const TomlKey> keys, std::span<const TomlKey> defaults) {
  DYNMO_CHECK(keys.size() == defaults.size(), "the same keys, got {} and {}", keys.size(),
              defaults.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const TomlKey& key = keys[i];
    if (key.acts_if.empty() || !key.refused.empty() || has_same_value(key, defaults[i])) continue;
    const ActsIf* condition = unmet(key, keys);
    if (condition == nullptr) continue;
    return make_error(ErrorCode::kBadInput,
                      "{0} is {1} with {2}, which does not use it: wanted {3}, or no {0}", key.name,
                      toml_value(key.field), now_text(*condition, keys), text_of(*condition));
  }
  return {};
}

void reset_idle(std::span<const TomlKey> keys, std::span<const TomlKey> defaults) {
  DYNMO_CHECK(keys.size() == defaults.size(), "the same keys, got {} and {}", keys.size(),
              defaults.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const bool given = !keys[i].acts_if.empty() && !has_same_value(keys[i], defaults[i]);
    if (given && unmet(keys[i], keys) != nullptr) copy_value(keys[i].field, defaults[i].field);
  }
}

Expected<void> apply_overrides(const std::function<std::vector<TomlKey>()>& make_keys,
                               std::span<const TomlKey> defaults,
                               std::span<const std::string> settings, std::string_view example) {
  const std::vector<TomlKey> before = make_keys();
  std::vector<bool> acted;
  for (std::size_t i = 0; i < before.size(); ++i) {
    const bool given = !before[i].acts_if.empty() && !has_same_value(before[i], defaults[i]);
    acted.push_back(given && unmet(before[i], before) == nullptr);
  }
  DYNMO_TRY(apply_toml_settings(before, settings, example));
  const std::vector<TomlKey> after = make_keys();
  const auto is_set = [&](const std::string& name) {
    return std::ranges::any_of(settings, [&](const std::string& setting) {
      return setting.substr(0, setting.find('=')) == name;
    });
  };
  for (std::size_t i = 0; i < after.size(); ++i) {
    const bool lost = acted[i] && unmet(after[i], after) != nullptr;
    if (lost && !is_set(after[i].name)) copy_value(after[i].field, defaults[i].field);
  }
  return {};
}

Expected<void> check_flags(std::initializer_list<FlagUse> flags) {
  for (const FlagUse& use : flags) {
    if (!use.given || use.acts) continue;
    return make_error(ErrorCode::kBadInput, "{0} does nothing here: wanted {1} with it, or no {0}",
                      use.flag, use.wanted);
  }
  return {};
}

}  // namespace dynmo
