// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads JSON from other programs. Every value is checked, and an error names the file and the JSON
// pointer. Writing needs no help: build a `Json` and dump it.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"

namespace dynmo {

using Json = nlohmann::ordered_json;

// Maximum size of a file's text. Its values would take about ten times the memory.
inline constexpr std::size_t kMaxJsonBytes = std::size_t{256} << 20;

// Reads a file of JSON. Returns kBadInput if the file cannot be read or is not JSON (with the line
// of the fault). Also returns it for more than 64 nested levels, or if an object has a key twice.
[[nodiscard]] Expected<Json> read_json(const std::filesystem::path& path);
[[nodiscard]] Expected<Json> parse_json(std::string_view text, std::string_view origin);

// Calls `visit` with the value of each line and its place: `name`, `before_number` and the line's
// number. Ignores an unreadable last line without a newline, which a killed process left half
// written. Returns the first error.
[[nodiscard]] Expected<void> visit_json_lines(
    std::string_view text, std::string_view name,
    const std::function<Expected<void>(Json json, const std::string& origin)>& visit,
    std::string_view before_number = ": line ");

// Reads one object. After the first fault, later reads return defaults. So a caller reads all
// fields and then checks once: `DYNMO_TRY(object.finish())`.
class JsonObject {
 public:
  // Reads `json`, which is at `pointer` ("" is the root) of the file `origin`.
  JsonObject(const Json& json, std::string origin, std::string pointer = "");

  // Returns the value of a key, which is required unless a fallback is given. Numbers are finite.
  // `bytes` and `integer` are whole.
  [[nodiscard]] double number(const std::string& key, std::optional<double> fallback = {});
  [[nodiscard]] std::int64_t integer(const std::string& key,
                                     std::optional<std::int64_t> fallback = {});
  [[nodiscard]] Bytes bytes(const std::string& key, std::optional<Bytes> fallback = {});  // >= 0
  [[nodiscard]] bool boolean(const std::string& key, std::optional<bool> fallback = {});
  [[nodiscard]] std::string string(const std::string& key,
                                   std::optional<std::string> fallback = {});
  // Returns the elements of an array of objects. object() returns the object below `key`. The
  // caller passes each to take_fault() after reading it.
  [[nodiscard]] std::vector<JsonObject> objects(const std::string& key);
  [[nodiscard]] std::optional<JsonObject> object(const std::string& key);  // nullopt if absent
  void ignore(const std::string& key);                                     // known, not read
  // Returns the value below `key`, or nullptr if it is absent.
  [[nodiscard]] const Json* value(const std::string& key) { return find(key); }
  // Checks `"format": format`.
  void expect_format(std::string_view format);

  // Records a fault that the caller found at `key`, e.g. a negative time.
  void fail(const std::string& key, std::string_view message);
  // Returns the first fault, else an error for the first key that was not read.
  [[nodiscard]] Expected<void> finish() const;
  // Finishes `inner`, an object below this one, and records its fault here.
  void take_fault(const JsonObject& inner);

 private:
  const Json* find(const std::string& key);
  const Json* require(const std::string& key, bool has_fallback);

  const Json* json_;
  std::string origin_;
  std::string pointer_;
  std::vector<std::string> known_;
  std::optional<Error> error_;
};

}  // namespace dynmo
