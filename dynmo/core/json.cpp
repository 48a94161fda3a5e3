// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/json.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <unordered_set>

#include "dynmo/core/files.h"
#include "dynmo/core/nearest.h"

namespace dynmo {

namespace {

// Thrown to stop the parser.
struct Refused {
  std::string why;
};

// Checks the depth of a text during parsing, and that no key occurs twice. The parser would
// silently keep the last one.
class ParseGuard {
 public:
  void see(Json::parse_event_t event, const Json& value) {
    using Event = Json::parse_event_t;
    switch (event) {
      case Event::object_start:
      case Event::array_start:
        begin(event == Event::array_start);
        break;
      case Event::object_end:
      case Event::array_end:
        levels_.pop_back();
        break;
      case Event::key:
        see_key(value.get_ref<const std::string&>());
        break;
      case Event::value:
        count_element();
        break;
    }
  }

  // Returns the place of the next value.
  [[nodiscard]] std::string next_pointer() {
    count_element();
    return pointer();
  }

 private:
  struct Level {
    bool array = false;
    std::size_t elements = 0;              // of an array, so far
    std::vector<std::string> keys;         // of an object, in order; the last is the current one
    std::unordered_set<std::string> many;  // the same, if they are many
  };

  void begin(bool array) {
    // Our files never nest deeper. The library parses recursively, so a hostile file could overflow
    // the stack.
    constexpr std::size_t kMaxLevels = 64;
    count_element();
    if (levels_.size() >= kMaxLevels) {
      throw Refused{fmt::format("wanted JSON of at most {} levels", kMaxLevels)};
    }
    levels_.push_back({.array = array, .elements = 0, .keys = {}, .many = {}});
  }

  void count_element() {
    if (!levels_.empty() && levels_.back().array) ++levels_.back().elements;
  }

  void see_key(const std::string& key) {
    constexpr std::size_t kFew = 16;
    Level& level = levels_.back();
    const bool few = level.keys.size() < kFew;
    const bool twice =
        few ? std::find(level.keys.begin(), level.keys.end(), key) != level.keys.end()
            : !level.many.insert(key).second;
    level.keys.push_back(key);
    if (twice) throw Refused{fmt::format("{} is given twice, wanted each key once", pointer())};
    if (level.keys.size() == kFew) level.many.insert(level.keys.begin(), level.keys.end());
  }

  // Returns the place of the current value.
  [[nodiscard]] std::string pointer() const {
    std::string text;
    for (const Level& level : levels_) {
      text += "/";
      if (level.array) {
        text += fmt::format("{}", level.elements - 1);
        continue;
      }
      if (level.keys.empty()) continue;
      for (const char c : level.keys.back()) {
        text += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
      }
    }
    return text;
  }

  std::vector<Level> levels_;
};

// Returns the NaN or Inf, which JSON does not have, at which parsing stopped after `bytes`. Returns
// "" if it stopped at another text.
std::string_view number_at(std::string_view text, std::size_t bytes) {
  if (bytes == 0 || bytes > text.size()) return "";
  const std::string_view rest = text.substr(bytes - 1);
  const bool negative = bytes > 1 && text[bytes - 2] == '-';
  if (rest.starts_with("Infinity")) return negative ? "-Infinity" : "Infinity";
  return rest.starts_with("NaN") ? "NaN" : "";
}

// Returns the number of values of a JSON text, or more if it is not JSON.
std::size_t count_values(std::string_view text) {
  std::size_t count = 1;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\') ++i;
    if (c == '"') in_string = !in_string;
    if (!in_string && (c == ',' || c == '[' || c == '{')) ++count;
  }
  return count;
}

// Throws std::bad_alloc unless there is memory for the values of a large text. The library
// allocates when it destroys a value too, and a failure there would end the process.
void require_memory(std::string_view text) {
  constexpr std::size_t kSmall = std::size_t{1} << 20;
  constexpr std::size_t kBytesPerValue = 160;  // an object's member, while its vector grows
  if (text.size() < kSmall) return;
  const std::size_t bytes = count_values(text) * kBytesPerValue + 2 * text.size();
  void* room = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) throw std::bad_alloc();
  ::munmap(room, bytes);
}

}  // namespace

Expected<Json> read_json(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const std::string text, read_file(path, kMaxJsonBytes));
  return parse_json(text, path.string());
}

Expected<Json> parse_json(std::string_view text, std::string_view origin) {
  require_memory(text);
  ParseGuard guard;
  const auto watch = [&](int, Json::parse_event_t event, const Json& value) {
    guard.see(event, value);
    return true;
  };
  try {
    return Json::parse(text, watch);
  } catch (const Refused& refused) {
    return make_error(ErrorCode::kBadInput, "{}: {}", origin, refused.why);
  } catch (const Json::exception& fault) {
    std::string why = fault.what();
    if (const auto start = why.find("] "); start != std::string::npos) why = why.substr(start + 2);
    std::replace(why.begin(), why.end(), '\n', ' ');
    const auto* stopped = dynamic_cast<const Json::parse_error*>(&fault);
    const auto number = stopped == nullptr ? "" : number_at(text, stopped->byte);
    if (!number.empty()) {
      const std::string place = guard.next_pointer();
      return make_error(ErrorCode::kBadInput,
                        "{}: {} is {}, which JSON does not have: wanted a finite number or null",
                        origin, place.empty() ? "/" : place, number);
    }
    const std::string other = known_content(text);
    return make_error(ErrorCode::kBadInput, "{}: wanted JSON: {}", origin,
                      other.empty() ? why : "it is " + other);
  }
}

Expected<void> visit_json_lines(
    std::string_view text, std::string_view name,
    const std::function<Expected<void>(Json json, const std::string& origin)>& visit,
    std::string_view before_number) {
  for (int number = 1; !text.empty(); ++number) {
    const std::size_t newline = text.find('\n');
    const bool finished = newline != std::string_view::npos;
    const std::string origin = fmt::format("{}{}{}", name, before_number, number);
    auto json = parse_json(text.substr(0, newline), origin);
    if (!json) return finished ? Expected<void>(json.error()) : Expected<void>();
    DYNMO_TRY(visit(*std::move(json), origin));
    text.remove_prefix(finished ? newline + 1 : text.size());
  }
  return {};
}

JsonObject::JsonObject(const Json& json, std::string origin, std::string pointer)
    : json_(&json), origin_(std::move(origin)), pointer_(std::move(pointer)) {
  if (!json.is_object()) {
    error_ = make_error(ErrorCode::kBadInput, "{}: {} is {}, wanted an object", origin_,
                        pointer_.empty() ? "/" : pointer_, json.type_name());
  }
}

const Json* JsonObject::find(const std::string& key) {
  if (std::find(known_.begin(), known_.end(), key) == known_.end()) known_.push_back(key);
  if (error_) return nullptr;
  const auto found = json_->find(key);
  return found == json_->end() ? nullptr : &*found;
}

const Json* JsonObject::require(const std::string& key, bool has_fallback) {
  const Json* found = find(key);
  if (found == nullptr && !has_fallback && !error_) fail(key, "is missing");
  return found;
}

void JsonObject::fail(const std::string& key, std::string_view message) {
  if (error_) return;
  error_ = make_error(ErrorCode::kBadInput, "{}: {}/{} {}", origin_, pointer_, key, message);
}

double JsonObject::number(const std::string& key, std::optional<double> fallback) {
  const Json* found = require(key, fallback.has_value());
  if (found == nullptr) return fallback.value_or(0);
  if (!found->is_number() || !std::isfinite(found->get<double>())) {
    fail(key, fmt::format("is {}, wanted a finite number", found->dump()));
    return fallback.value_or(0);
  }
  return found->get<double>();
}

std::int64_t JsonObject::integer(const std::string& key, std::optional<std::int64_t> fallback) {
  const Json* found = require(key, fallback.has_value());
  if (found == nullptr) return fallback.value_or(0);
  const bool too_large = found->is_number_unsigned() &&
                         found->get<std::uint64_t>() >
                             static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (!found->is_number_integer() || too_large) {
    fail(key, fmt::format("is {}, wanted a whole number", found->dump()));
    return fallback.value_or(0);
  }
  return found->get<std::int64_t>();
}

Bytes JsonObject::bytes(const std::string& key, std::optional<Bytes> fallback) {
  std::optional<std::int64_t> amount;
  if (fallback) amount = fallback->value;
  const Bytes read{integer(key, amount)};
  if (read < Bytes{0}) fail(key, fmt::format("is {}, wanted bytes, 0 or more", read.value));
  return read;
}

bool JsonObject::boolean(const std::string& key, std::optional<bool> fallback) {
  const Json* found = require(key, fallback.has_value());
  if (found == nullptr) return fallback.value_or(false);
  if (!found->is_boolean()) {
    fail(key, fmt::format("is {}, wanted true or false", found->dump()));
    return fallback.value_or(false);
  }
  return found->get<bool>();
}

std::string JsonObject::string(const std::string& key, std::optional<std::string> fallback) {
  const Json* found = require(key, fallback.has_value());
  if (found == nullptr) return std::move(fallback).value_or("");
  if (!found->is_string()) {
    fail(key, fmt::format("is {}, wanted a string", found->dump()));
    return std::move(fallback).value_or("");
  }
  return found->get<std::string>();
}

std::vector<JsonObject> JsonObject::objects(const std::string& key) {
  const Json* found = require(key, /*has_fallback=*/false);
  std::vector<JsonObject> elements;
  if (found == nullptr) return elements;
  if (!found->is_array()) {
    fail(key, fmt::format("is {}, wanted an array", found->type_name()));
    return elements;
  }
  for (std::size_t i = 0; i < found->size(); ++i) {
    elements.emplace_back((*found)[i], origin_, fmt::format("{}/{}/{}", pointer_, key, i));
  }
  return elements;
}

std::optional<JsonObject> JsonObject::object(const std::string& key) {
  const Json* found = find(key);
  if (found == nullptr) return std::nullopt;
  return JsonObject(*found, origin_, fmt::format("{}/{}", pointer_, key));
}

void JsonObject::ignore(const std::string& key) { known_.push_back(key); }

void JsonObject::expect_format(std::string_view format) {
  const std::string found = string("format");
  if (!error_ && found != format) {
    fail("format", fmt::format("is '{}', wanted '{}'", found, format));
  }
}

Expected<void> JsonObject::finish() const {
  if (error_) return *error_;
  for (const auto& [key, value] : json_->items()) {
    if (std::find(known_.begin(), known_.end(), key) == known_.end()) {
      return make_error(ErrorCode::kBadInput, "{}: {}/{} is not a known key{}", origin_, pointer_,
                        key, suggestion(key, known_));
    }
  }
  return {};
}

void JsonObject::take_fault(const JsonObject& inner) {
  if (error_) return;
  if (const auto read = inner.finish(); !read) error_ = read.error();
}

}  // namespace dynmo
