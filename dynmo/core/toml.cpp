// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/toml.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <type_traits>

#include "dynmo/core/nearest.h"

namespace dynmo {
namespace {

// Limits the dots of a key. toml++ makes a table of each, and frees them by recursion.
constexpr std::size_t kMaxDotsInALine = 256;

Expected<void> set_all(std::span<const TomlKey> keys, const toml::table& table,
                       const std::string& prefix, std::string_view file);

// Each `read` sets a field, or returns what was wanted instead.
std::string read(const toml::node& node, std::int64_t* field) {
  if (!node.is_integer()) return "a whole number";
  *field = node.as_integer()->get();
  return "";
}
std::string read(const toml::node& node, int* field) {
  std::int64_t value = 0;
  if (std::string wanted = read(node, &value); !wanted.empty()) return wanted;
  if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max()) {
    return "a whole number of at most 2147483647";
  }
  *field = static_cast<int>(value);
  return "";
}
std::string read(const toml::node& node, double* field) {
  const std::optional<double> value = node.is_number() ? node.value<double>() : std::nullopt;
  if (!value || !std::isfinite(*value)) return "a finite number";
  *field = *value;
  return "";
}
std::string read(const toml::node& node, bool* field) {
  if (!node.is_boolean()) return "true or false";
  *field = node.as_boolean()->get();
  return "";
}
std::string read(const toml::node& node, std::optional<bool>* field) {
  return read(node, &field->emplace());
}
std::string read(const toml::node& node, std::string* field) {
  if (!node.is_string()) return "a string";
  const std::string& text = node.as_string()->get();
  // A path would end there.
  if (text.find('\0') != std::string::npos) return "a string without the character \\u0000";
  *field = text;
  return "";
}
std::string read(const toml::node& node, std::vector<std::int64_t>* field) {
  if (!node.is_array()) return "an array of whole numbers";
  std::vector<std::int64_t> values;
  for (const toml::node& element : *node.as_array()) {
    std::int64_t value = 0;
    if (!read(element, &value).empty()) return "an array of whole numbers";
    values.push_back(value);
  }
  *field = std::move(values);
  return "";
}
std::string read(const toml::node& node, std::vector<std::string>* field) {
  if (!node.is_array()) return "an array of strings";
  std::vector<std::string> values;
  for (const toml::node& element : *node.as_array()) {
    if (!element.is_string()) return "an array of strings";
    if (std::string wanted = read(element, &values.emplace_back()); !wanted.empty()) return wanted;
  }
  *field = std::move(values);
  return "";
}
std::string read(const toml::node& node, Bytes* field) {
  constexpr const char* kWanted = "bytes, such as \"80GiB\", \"512 MB\" or a whole number of them";
  if (node.is_integer() && node.as_integer()->get() >= 0) {
    *field = Bytes{node.as_integer()->get()};
    return "";
  }
  const auto bytes = parse_bytes(node.is_string() ? node.as_string()->get() : std::string());
  if (!bytes) return kWanted;
  *field = *bytes;
  return "";
}
std::string read(const toml::node& node, TomlSeconds seconds) {
  double value = 0;
  if (!node.is_string() && read(node, &value).empty() && value >= 0) {
    *seconds.field = value;
    return "";
  }
  const auto parsed = parse_seconds(node.is_string() ? node.as_string()->get() : std::string());
  if (!parsed) return "a time, such as \"20us\", \"1.5 s\" or a number of seconds";
  *seconds.field = *parsed;
  return "";
}
std::string read(const toml::node& node, TomlBandwidth bandwidth) {
  const std::optional<double> value = node.is_number() ? node.value<double>() : std::nullopt;
  if (value && *value >= 0) {  // false for nan, true for inf
    *bandwidth.field = *value;
    return "";
  }
  const auto parsed =
      parse_bytes_per_second(node.is_string() ? node.as_string()->get() : std::string());
  if (!parsed) {
    return "a bandwidth, such as \"50GB/s\" (bytes, not bits), or inf";
  }
  *bandwidth.field = *parsed;
  return "";
}
std::string read(const toml::node& node, TomlAuto number) {
  if (node.is_string() && node.as_string()->get() == "auto") {
    number.field->reset();
    return "";
  }
  double value = 0;
  if (!read(node, &value).empty()) return "a finite number or \"auto\"";
  *number.field = value;
  return "";
}
std::string read(const toml::node& node, const TomlChoice& choice) {
  const std::string given = node.is_string() ? node.as_string()->get() : std::string();
  for (std::size_t i = 0; i < choice.names.size(); ++i) {
    if (given != choice.names[i]) continue;
    choice.set(i);
    return "";
  }
  return listed(choice.names) +
         did_you_mean(given, std::vector<std::string>(choice.names.begin(), choice.names.end()));
}

// Returns the text, shortened to kMaxShown and without line ends.
std::string one_line(std::string text) {
  constexpr std::size_t kMaxShown = 160;
  if (text.size() > kMaxShown) text = text.substr(0, kMaxShown) + "...";
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
  return text;
}

std::string shown(const toml::node& node) {
  std::ostringstream text;
  node.visit([&](const auto& value) {
    if constexpr (toml::is_table<decltype(value)>) {
      text << "a table";
    } else {
      text << value;
    }
  });
  return one_line(std::move(text).str());
}

Expected<void> set_tables(const TomlTables& tables, const std::string& key, const toml::node& node,
                          const std::string& where, std::string_view file) {
  const auto wrong = [&](const toml::node& found) {
    return make_error(ErrorCode::kBadInput, "{}: {} is {}, wanted tables, such as [[{}]]", where,
                      key, shown(found), key);
  };
  if (!node.is_array()) return wrong(node);
  tables.clear();
  for (const toml::node& element : *node.as_array()) {
    if (!element.is_table()) return wrong(element);
    const std::vector<TomlKey> keys = tables.add();
    DYNMO_TRY(set_all(keys, *element.as_table(), key, file));
  }
  return {};
}

std::vector<std::string> names_of(std::span<const TomlKey> keys) {
  std::vector<std::string> names;
  for (const TomlKey& key : keys) {
    if (key.refused.empty()) names.push_back(key.name);
  }
  return names;
}

// Returns the keys of the table that an unknown key names, or all tables if that is unknown, too.
std::string known_ones(const std::string& given, std::span<const std::string> names) {
  const auto table_of = [](const std::string& name) { return name.substr(0, name.find('.')); };
  std::vector<std::string> keys;
  std::vector<std::string> tables;
  for (const std::string& name : names) {
    const std::string table = table_of(name);
    if (table == table_of(given)) keys.push_back(name);
    if (std::ranges::find(tables, table) == tables.end()) tables.push_back(table);
  }
  return fmt::format(", known are {}", fmt::join(keys.empty() ? tables : keys, ", "));
}

Expected<void> set(std::span<const TomlKey> keys, const std::string& name, const toml::node& value,
                   const std::string& where, std::string_view file) {
  const auto key =
      std::find_if(keys.begin(), keys.end(), [&](const TomlKey& k) { return k.name == name; });
  if (key == keys.end()) {
    const std::string given = one_line(name);
    const std::vector<std::string> names = names_of(keys);
    const std::string near = did_you_mean(given, names);
    return make_error(ErrorCode::kBadInput, "{}: '{}' is not a known key{}", where, given,
                      near.empty() ? known_ones(given, names) : near);
  }
  if (!key->refused.empty()) {
    return make_error(ErrorCode::kBadInput, "{}: {} {}", where, name, key->refused);
  }
  if (const auto* tables = std::get_if<TomlTables>(&key->field)) {
    return set_tables(*tables, name, value, where, file);
  }
  const std::string wanted = std::visit(
      [&](const auto& field) -> std::string {
        if constexpr (std::is_same_v<std::decay_t<decltype(field)>, TomlTables>) {
          return "";
        } else {
          return read(value, field);
        }
      },
      key->field);
  if (wanted.empty()) return {};
  return make_error(ErrorCode::kBadInput, "{}: {} is {}, wanted {}", where, name, shown(value),
                    wanted);
}

bool is_key(std::span<const TomlKey> keys, const std::string& name) {
  return std::any_of(keys.begin(), keys.end(), [&](const TomlKey& k) { return k.name == name; });
}

Expected<void> set_all(std::span<const TomlKey> keys, const toml::table& table,
                       const std::string& prefix, std::string_view file) {
  for (const auto& [key, value] : table) {
    const std::string name =
        prefix.empty() ? std::string(key.str()) : fmt::format("{}.{}", prefix, key.str());
    const std::string where = value.source().begin.line > 0
                                  ? fmt::format("{}:{}", file, value.source().begin.line)
                                  : std::string(file);
    const bool table_of_keys = value.is_table() && prefix.empty() && !is_key(keys, name);
    if (table_of_keys && !value.as_table()->empty()) {
      DYNMO_TRY(set_all(keys, *value.as_table(), name, file));
    } else if (table_of_keys && std::any_of(keys.begin(), keys.end(), [&](const TomlKey& k) {
                 return k.name.starts_with(name + ".");
               })) {
      continue;  // "[model]" and nothing below it
    } else {
      DYNMO_TRY(set(keys, name, value, where, file));
    }
  }
  return {};
}

bool has_long_key(std::string_view text) {
  std::size_t dots = 0;
  for (const char c : text) {
    if (c == '\n') dots = 0;
    if (c == '.' && ++dots > kMaxDotsInALine) return true;
  }
  return false;
}

Expected<toml::table> parse(std::string_view text, std::string_view origin) {
  if (text.size() > kMaxTomlBytes || has_long_key(text)) {
    return make_error(ErrorCode::kBadInput,
                      "{}: wanted TOML of at most {} bytes and {} dots a line, got {} bytes",
                      origin, kMaxTomlBytes, kMaxDotsInALine, text.size());
  }
  try {
    return toml::parse(text, origin);
  } catch (const toml::parse_error& fault) {
    return make_error(ErrorCode::kBadInput, "{}:{}: wanted TOML: {}", origin,
                      fault.source().begin.line, one_line(std::string(fault.description())));
  }
}

std::string written(const int* value) { return fmt::format("{}", *value); }
std::string written(const std::int64_t* value) { return fmt::format("{}", *value); }
std::string written(const bool* value) { return *value ? "true" : "false"; }
std::string written(const std::optional<bool>* value) {
  const bool given = value->value_or(false);
  return written(&given);
}
std::string written(const double* value) {
  const std::string text = fmt::format("{}", *value);
  return text.find_first_of(".enf") == std::string::npos ? text + ".0" : text;
}
std::string written(const std::string* value) {
  std::ostringstream text;
  text << toml::value<std::string>(*value);
  return text.str();
}
std::string written(const std::vector<std::int64_t>* value) {
  return fmt::format("[{}]", fmt::join(*value, ", "));
}
std::string written(const std::vector<std::string>* value) {
  std::vector<std::string> quoted;
  for (const std::string& element : *value) quoted.push_back(written(&element));
  return fmt::format("[{}]", fmt::join(quoted, ", "));
}
std::string written(const Bytes* value) { return fmt::format("{}", value->value); }
std::string written(TomlSeconds seconds) { return written(seconds.field); }
std::string written(TomlBandwidth bandwidth) { return written(bandwidth.field); }
std::string written(TomlAuto number) {
  return *number.field ? written(&**number.field) : "\"auto\"";
}
std::string written(const TomlChoice& choice) {
  const std::string name(choice.names[choice.get()]);
  return written(&name);
}
std::string written(const TomlTables& tables) {
  std::vector<std::string> inline_tables;
  for (const std::vector<TomlKey>& keys : tables.all()) {
    std::vector<std::string> fields;
    for (const TomlKey& key : keys) {
      fields.push_back(
          fmt::format("{} = {}", key.name.substr(key.name.rfind('.') + 1), toml_value(key.field)));
    }
    inline_tables.push_back(fmt::format("{{{}}}", fmt::join(fields, ", ")));
  }
  return fmt::format("[{}]", fmt::join(inline_tables, ", "));
}

}  // namespace

Expected<void> check_values(std::span<const TomlKey> keys) {
  for (const TomlKey& key : keys) {
    if (const auto value = limited_value(key.field)) {
      DYNMO_TRY(check_allowed(key.name, *value, key.allowed));
    }
  }
  return {};
}

Expected<void> apply_toml(std::span<const TomlKey> keys, std::string_view text,
                          std::string_view origin) {
  DYNMO_ASSIGN(const toml::table table, parse(text, origin));
  return set_all(keys, table, "", origin);
}

Expected<void> apply_toml_settings(std::span<const TomlKey> keys,
                                   std::span<const std::string> settings,
                                   std::string_view example) {
  for (const std::string& setting : settings) {
    const std::string where = fmt::format("setting {}", setting);
    const auto equals = setting.find('=');
    if (equals == std::string::npos || equals == 0) {
      return make_error(ErrorCode::kBadInput, "{}: wanted key=value, such as {}", where, example);
    }
    const std::string key = setting.substr(0, equals);
    const std::string value = setting.substr(equals + 1);
    auto table = parse("value = " + value, where);
    if (!table || table->size() != 1) {  // a string without quotes
      toml::table text;
      text.insert("value", value);
      table = std::move(text);
    }
    DYNMO_TRY(set(keys, key, *table->get("value"), where, where));
  }
  return {};
}

std::string to_toml(std::span<const TomlKey> keys) {
  std::string top;  // keys of no table come first, else they would be the last table's
  std::string text;
  std::string table;
  for (const TomlKey& key : keys) {
    if (!key.refused.empty()) continue;
    const auto* optional = std::get_if<std::optional<bool>*>(&key.field);
    if (optional != nullptr && !(*optional)->has_value()) continue;
    const auto dot = key.name.find('.');
    if (dot == std::string::npos) {
      top += fmt::format("{} = {}\n", key.name, toml_value(key.field));
      continue;
    }
    if (key.name.substr(0, dot) != table) {
      table = key.name.substr(0, dot);
      text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", table);
    }
    text += fmt::format("{} = {}\n", key.name.substr(dot + 1), toml_value(key.field));
  }
  return top + (top.empty() || text.empty() ? "" : "\n") + text;
}

std::string toml_value(const TomlField& field) {
  return std::visit([](const auto& value) { return written(value); }, field);
}

std::optional<AllowedValue> limited_value(const TomlField& field) {
  return std::visit(
      [](const auto& f) -> std::optional<AllowedValue> {
        using Field = std::decay_t<decltype(f)>;
        if constexpr (std::is_same_v<Field, int*>) return std::int64_t{*f};
        if constexpr (std::is_same_v<Field, std::int64_t*>) return *f;
        if constexpr (std::is_same_v<Field, double*>) return *f;
        if constexpr (std::is_same_v<Field, Bytes*>) return f->value;
        if constexpr (std::is_same_v<Field, TomlSeconds>) return *f.field;
        if constexpr (std::is_same_v<Field, TomlBandwidth>) return *f.field;
        if constexpr (std::is_same_v<Field, TomlAuto>) {
          if (*f.field) return **f.field;
        }
        if constexpr (std::is_same_v<Field, std::string*>) return std::string_view(*f);
        return std::nullopt;
      },
      field);
}

}  // namespace dynmo
