// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reading JSON written by somebody else: every value is checked, and an error names the file and
// the JSON pointer. (Writing needs no help: build a `Json` and dump it.)

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"

namespace dynmo {

using Json = nlohmann::ordered_json;

// A file with more text than this is refused: its values would take about ten times the memory.
inline constexpr std::size_t kMaxJsonBytes = std::size_t{256} << 20;

// kBadInput if the file cannot be read or is not JSON (with the line of the fault), nests more than
// 64 levels, or gives a key of an object twice.
[[nodiscard]] Expected<Json> read_json(const std::filesystem::path& path);
[[nodiscard]] Expected<Json> parse_json(std::string_view text, std::string_view origin);

// Reads one object. The first fault sticks and later reads return defaults, so that a caller reads
// all fields in a row and asks once: `DYNMO_TRY(object.finish())`.
class JsonObject {
 public:
  // `origin` is the file's name, `pointer` the place of `json` in it ("" is the root).
  JsonObject(const Json& json, std::string origin, std::string pointer = "");

  // Required unless a fallback is given. Numbers are finite; `bytes` and `integer` are whole.
  [[nodiscard]] double number(const std::string& key, std::optional<double> fallback = {});
  [[nodiscard]] std::int64_t integer(const std::string& key,
                                     std::optional<std::int64_t> fallback = {});
  [[nodiscard]] Bytes bytes(const std::string& key, std::optional<Bytes> fallback = {});  // >= 0
  [[nodiscard]] bool boolean(const std::string& key, std::optional<bool> fallback = {});
  [[nodiscard]] std::string string(const std::string& key,
                                   std::optional<std::string> fallback = {});
  // Elements of an array of objects / the object below `key`; each must be finished by the caller.
  [[nodiscard]] std::vector<JsonObject> objects(const std::string& key);
  [[nodiscard]] std::optional<JsonObject> object(const std::string& key);  // nullopt if absent
  void ignore(const std::string& key);                                     // known, not needed
  // Returns the value below `key`, or nullptr if it is absent.
  [[nodiscard]] const Json* value(const std::string& key) { return find(key); }
  // Checks `"format": format`.
  void expect_format(std::string_view format);

  // Records a fault of the caller's own at `key`, e.g. a negative time.
  void fail(const std::string& key, std::string_view message);
  // The first fault, else an error for the first key nobody asked for.
  [[nodiscard]] Expected<void> finish() const;
  // Takes over the fault of finishing an object below this one.
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
