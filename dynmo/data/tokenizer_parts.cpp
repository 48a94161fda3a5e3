// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "dynmo/core/json.h"
#include "dynmo/data/tokenizer_parts_impl.h"
#include "dynmo/data/utf8.h"

namespace dynmo::data {
namespace {

// JSON with sorted keys. `Json` would compare up to 128,000 keys for each one.
using LargeJson = nlohmann::json;

std::string shown_json(const LargeJson& json) {
  const std::string text = json.dump(-1, ' ', false, LargeJson::error_handler_t::replace);
  return text.size() > 60
             ? text.substr(0, 60 - incomplete_tail(std::string_view(text).substr(0, 60))) + "..."
             : text;
}

Expected<void> read_vocabulary(const LargeJson& json, const std::string& origin,
                               TokenizerParts& parts) {
  if (!json.is_object() || json.empty()) {
    return make_error(ErrorCode::kBadInput, "{}: /model/vocab is {}, wanted an object of ids",
                      origin, json.is_object() ? "empty" : json.type_name());
  }
  const ByteTable table;
  std::vector<bool> taken;
  for (const auto& [written, value] : json.items()) {
    const bool whole = value.is_number_unsigned() && value.get<std::uint64_t>() < kMaxTokenIds;
    if (!whole) {
      return make_error(ErrorCode::kBadInput,
                        "{}: token {} of /model/vocab has the id {}, wanted 0 to {}", origin,
                        in_quotes(written), shown_json(value), kMaxTokenIds - 1);
    }
    const auto id = value.get<std::size_t>();
    if (id >= taken.size()) {
      parts.texts.resize(id + 1);
      taken.resize(id + 1);
    }
    if (taken[id]) {
      return make_error(ErrorCode::kBadInput,
                        "{}: two tokens of /model/vocab have the id {}, such as {}", origin, id,
                        in_quotes(written));
    }
    taken[id] = true;
    parts.texts[id] = table.bytes_of(written).value_or(written);
    parts.ids.emplace(written, static_cast<std::int32_t>(id));
  }
  for (int byte = 0; byte < 256; ++byte) {
    const std::string& character = table.character_of(static_cast<std::uint8_t>(byte));
    const auto found = parts.ids.find(character);
    if (found == parts.ids.end()) {
      return make_error(ErrorCode::kBadInput,
                        "{}: /model/vocab has no token for byte 0x{:02x}, {}: wanted all 256, as a "
                        "byte-level BPE has",
                        origin, byte, in_quotes(character));
    }
    parts.bytes[static_cast<std::size_t>(byte)] = found->second;
  }
  return {};
}

// Reads merges, each a line "a b" or a pair.
Expected<void> read_merges(const LargeJson& json, const std::string& origin,
                           TokenizerParts& parts) {
  const auto refused = [&](std::size_t rank, const LargeJson& merge, std::string_view wanted) {
    return make_error(ErrorCode::kBadInput, "{}: /model/merges/{} is {}, wanted {}", origin, rank,
                      shown_json(merge), wanted);
  };
  if (!json.is_array()) {
    return make_error(ErrorCode::kBadInput, "{}: /model/merges is {}, wanted an array", origin,
                      json.type_name());
  }
  parts.merges.reserve(json.size());
  for (std::size_t rank = 0; rank < json.size(); ++rank) {
    const LargeJson& merge = json[rank];
    std::array<std::string, 2> pair;
    if (merge.is_string()) {
      const auto& line = merge.get_ref<const std::string&>();
      const std::size_t space = line.find(' ');
      if (space == std::string::npos || line.find(' ', space + 1) != std::string::npos) {
        return refused(rank, merge, "two tokens with a space between them");
      }
      pair = {line.substr(0, space), line.substr(space + 1)};
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      pair = {merge[0].get<std::string>(), merge[1].get<std::string>()};
    } else {
      return refused(rank, merge, "two tokens, as a string or an array");
    }
    std::array<std::int32_t, 3> ids{};
    const std::array<std::string, 3> names = {pair[0], pair[1], pair[0] + pair[1]};
    for (std::size_t i = 0; i < names.size(); ++i) {
      const auto found = parts.ids.find(names[i]);
      if (found == parts.ids.end()) {
        return refused(rank, merge,
                       fmt::format("tokens of /model/vocab, where {} is not", in_quotes(names[i])));
      }
      ids[i] = found->second;
    }
    parts.merges.push_back({.left = ids[0], .right = ids[1], .made = ids[2]});
  }
  return {};
}

// Refuses a value that changes what the model does, unless it is null or one of `idle`.
void expect_idle(JsonObject& object, const std::string& key, const Json& idle) {
  const Json* value = object.value(key);
  if (value == nullptr || value->is_null() || *value == idle) return;
  object.fail(key, fmt::format("is {}, which is not implemented: wanted {}",
                               shown_json(LargeJson(*value)), idle.dump()));
}

Expected<void> read_model(LargeJson& root, const std::string& origin, TokenizerParts& parts) {
  LargeJson& model = root["model"];
  const LargeJson vocabulary = std::exchange(model["vocab"], nullptr);
  const LargeJson merges = std::exchange(model["merges"], nullptr);
  const Json small = model;
  JsonObject object(small, origin, "/model");
  // A file of an early version names no type.
  const std::string type = object.string("type", "BPE");
  if (type != "BPE") {
    object.fail("type", fmt::format("is '{}', which is not implemented: wanted BPE", type));
  }
  expect_idle(object, "dropout", 0.0);
  expect_idle(object, "continuing_subword_prefix", "");
  expect_idle(object, "end_of_word_suffix", "");
  expect_idle(object, "byte_fallback", false);
  for (const char* key : {"vocab", "merges", "unk_token", "fuse_unk"}) object.ignore(key);
  parts.ignore_merges = object.boolean("ignore_merges", false);
  DYNMO_TRY(object.finish());
  DYNMO_TRY(read_vocabulary(vocabulary, origin, parts));
  return read_merges(merges, origin, parts);
}

// Returns the elements of a Sequence, the object itself if it is another type, or none for null.
std::vector<JsonObject> steps_of(JsonObject& root, const std::string& key,
                                 const std::string& list) {
  const Json* value = root.value(key);
  if (value == nullptr || value->is_null()) return {};
  auto object = root.object(key);
  if (!object) return {};
  const Json* type = object->value("type");
  if (type == nullptr || *type != "Sequence") return {std::move(*object)};
  auto steps = object->objects(list);
  root.take_fault(*object);
  return steps;
}

Expected<void> read_normalizer(JsonObject& root, TokenizerParts& parts) {
  for (JsonObject& step : steps_of(root, "normalizer", "normalizers")) {
    const std::string type = step.string("type");
    if (type != "NFC") {
      step.fail(
          "type",
          fmt::format("is '{}', a normalizer that is not implemented: wanted NFC or null", type));
    }
    DYNMO_TRY(step.finish());
    parts.normalizes = true;
  }
  return {};
}

// Adds the pattern of a Split or of ByteLevel. Returns whether it was ByteLevel, the last step.
Expected<bool> read_step(JsonObject& step, TokenizerParts& parts) {
  const std::string type = step.string("type");
  std::string pattern;
  if (type == "ByteLevel") {
    step.ignore("trim_offsets");
    if (step.boolean("add_prefix_space", true)) {
      step.fail("add_prefix_space", "is true, which is not implemented: wanted false");
    }
    if (step.boolean("use_regex", true)) pattern = kGpt2Pattern;
  } else if (type == "Split") {
    if (auto object = step.object("pattern")) {
      if (const Json* text = object->value("String")) {
        object->fail("String", fmt::format("is {}, which is not implemented: wanted Regex",
                                           shown_json(LargeJson(*text))));
      } else {
        pattern = object->string("Regex");
      }
      DYNMO_TRY(object->finish());
    } else {
      step.fail("pattern", "is missing");
    }
    const std::string behaviour = step.string("behavior");
    if (behaviour != "Isolated") {
      step.fail("behavior",
                fmt::format("is '{}', which is not implemented: wanted Isolated", behaviour));
    }
    if (step.boolean("invert", false))
      step.fail("invert", "is true, which is not implemented: wanted false");
  } else {
    step.fail(
        "type",
        fmt::format("is '{}', a pre-tokenizer that is not implemented: wanted Split or ByteLevel",
                    type));
  }
  if (!pattern.empty()) {
    auto compiled = SplitPattern::compile(pattern);
    if (compiled) {
      parts.patterns.push_back(std::move(*compiled));
    } else {
      step.fail("pattern",
                fmt::format("is {} with {}", in_quotes(pattern), compiled.error().message));
    }
  }
  DYNMO_TRY(step.finish());
  return type == "ByteLevel";
}

Expected<void> read_pre_tokenizer(JsonObject& root, const std::string& origin,
                                  TokenizerParts& parts) {
  bool whole = false;
  for (JsonObject& step : steps_of(root, "pre_tokenizer", "pretokenizers")) {
    if (whole) {
      return make_error(ErrorCode::kBadInput,
                        "{}: /pre_tokenizer has a step behind ByteLevel, which is not implemented",
                        origin);
    }
    DYNMO_ASSIGN(whole, read_step(step, parts));
  }
  DYNMO_TRY(root.finish());
  if (whole) return {};
  return make_error(ErrorCode::kBadInput,
                    "{}: /pre_tokenizer does not end with ByteLevel: wanted a byte-level BPE, such "
                    "as those of GPT-2, Llama 3 and Qwen",
                    origin);
}

Expected<void> read_added_tokens(JsonObject& root, const std::string& origin,
                                 TokenizerParts& parts) {
  std::vector<std::string>& texts = parts.texts;
  std::unordered_map<std::int32_t, std::string> seen;
  for (JsonObject& entry : root.objects("added_tokens")) {
    AddedToken token{.content = entry.string("content"),
                     .id = 0,
                     .left_strip = entry.boolean("lstrip", false),
                     .right_strip = entry.boolean("rstrip", false)};
    const std::int64_t id = entry.integer("id");
    if (id < 0 || id >= kMaxTokenIds)
      entry.fail("id", fmt::format("is {}, wanted 0 to {}", id, kMaxTokenIds - 1));
    if (entry.boolean("single_word", false)) {
      entry.fail("single_word", "is true, which is not implemented: wanted false");
    }
    const bool special = entry.boolean("special", false);
    const bool normalized = entry.boolean("normalized", !special);
    DYNMO_TRY(entry.finish());
    token.id = static_cast<std::int32_t>(id);
    const auto known = parts.ids.find(token.content);
    const auto place = static_cast<std::size_t>(token.id);
    const bool other = known != parts.ids.end() ? known->second != token.id
                                                : place < texts.size() && !texts[place].empty();
    if (other || !seen.emplace(token.id, token.content).second) {
      return make_error(ErrorCode::kBadInput,
                        "{}: the added token {} has the id {}, which is that of another one: "
                        "wanted ids that are unique",
                        origin, in_quotes(token.content), id);
    }
    if (place >= texts.size()) texts.resize(place + 1);
    texts[place] = token.content;
    parts.ids.emplace(token.content, token.id);
    if (special) parts.special.push_back(token.id);
    if (normalized && parts.normalizes) {
      std::string room;
      token.content = normal_form_c(token.content, room);
      parts.normalized.push_back(token);
    } else {
      parts.raw.push_back(token);
    }
  }
  return {};
}

}  // namespace

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kMax = 60;
  return Json(std::string(text.substr(0, kMax)))
             .dump(-1, ' ', false, Json::error_handler_t::replace) +
         (text.size() > kMax ? "..." : "");
}

// Printable bytes of Latin-1 are written as themselves, the others as U+0100 and up, in order.
ByteTable::ByteTable() {
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool itself = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    const int point = itself ? byte : next++;
    std::string& text = characters_[static_cast<std::size_t>(byte)];
    if (point >= 0x80) text += static_cast<char>(0xC0 | (point >> 6));
    text += static_cast<char>(point >= 0x80 ? 0x80 | (point & 0x3F) : point);
    bytes_.emplace(text, static_cast<char>(byte));
  }
}

std::optional<std::string> ByteTable::bytes_of(std::string_view written) const {
  std::string bytes;
  while (!written.empty()) {
    const std::size_t size = static_cast<unsigned char>(written.front()) < 0x80 ? 1 : 2;
    const auto found = bytes_.find(std::string(written.substr(0, size)));
    if (found == bytes_.end()) return {};
    bytes += found->second;
    written.remove_prefix(size);
  }
  return bytes;
}

Expected<TokenizerParts> read_tokenizer_parts(std::string_view content, const std::string& origin) {
  LargeJson root = LargeJson::parse(content, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded()) {
    // Reports the place of the fault.
    DYNMO_TRY(parse_json(content, origin));
    return make_error(ErrorCode::kBadInput, "{}: is not JSON", origin);
  }
  if (!root.is_object() || !root.contains("model") || !root["model"].is_object()) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' is JSON without a /model: wanted a tokenizer.json of a byte-level BPE, "
                      "or a SentencePiece model",
                      origin);
  }
  TokenizerParts parts;
  DYNMO_TRY(read_model(root, origin, parts));
  // These keys change neither the tokens of a text nor the text of tokens.
  for (const char* key : {"model", "post_processor", "decoder", "truncation", "padding", "version"})
    root.erase(key);
  const Json small = root;
  JsonObject object(small, origin);
  DYNMO_TRY(read_normalizer(object, parts));
  if (object.value("added_tokens") != nullptr) DYNMO_TRY(read_added_tokens(object, origin, parts));
  DYNMO_TRY(read_pre_tokenizer(object, origin, parts));
  return parts;
}

}  // namespace dynmo::data
