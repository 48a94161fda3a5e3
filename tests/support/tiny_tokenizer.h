// SPDX-License-Identifier: Apache-2.0
#pragma once

// A tokenizer.json of 256 bytes, a few merges and two added tokens.

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "dynmo/core/json.h"

namespace dynmo::data {

// The character that stands for a byte.
inline std::string written_byte(int byte) {
  int next = 0x100;
  for (int i = 0; i <= byte; ++i) {
    const bool itself = (i >= 0x21 && i <= 0x7E) || (i >= 0xA1 && i != 0xAD);
    const int point = itself ? i : next++;
    if (i < byte) continue;
    if (point < 0x80) return {static_cast<char>(point)};
    return {static_cast<char>(0xC0 | (point >> 6)), static_cast<char>(0x80 | (point & 0x3F))};
  }
  return {};
}

// Byte b is token b, and the merges make 256 and on. With a `pattern` it is as Llama 3 and Qwen
// write it, else as GPT-2 does.
inline Json tiny_tokenizer(std::string_view pattern = "") {
  Json vocabulary = Json::object();
  for (int byte = 0; byte < 256; ++byte) vocabulary[written_byte(byte)] = byte;
  Json merges = Json::array();
  const std::string space = written_byte(' ');
  const std::pair<std::string, std::string> pairs[] = {{"t", "h"}, {"th", "e"}, {space, "the"},
                                                       {"h", "e"}, {"a", "a"},  {"aa", "aa"}};
  int id = 256;
  for (const auto& [left, right] : pairs) {
    vocabulary[left + right] = id++;
    merges.push_back(pattern.empty() ? Json(fmt::format("{} {}", left, right))
                                     : Json({left, right}));
  }
  const auto added = [&](const char* content, bool special) {
    return Json{{"id", id++},      {"content", content},  {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", special}};
  };
  Json byte_level = {{"type", "ByteLevel"},
                     {"add_prefix_space", false},
                     {"trim_offsets", true},
                     {"use_regex", pattern.empty()}};
  Json split = {{"type", "Split"},
                {"pattern", {{"Regex", std::string(pattern)}}},
                {"behavior", "Isolated"},
                {"invert", false}};
  Json steps = {{"type", "Sequence"}, {"pretokenizers", Json::array({split, byte_level})}};
  Json json = {{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}};
  json["added_tokens"] = Json::array({added("<|end|>", true), added("<|mid|>", false)});
  json["normalizer"] = pattern.empty() ? Json() : Json{{"type", "NFC"}};
  json["pre_tokenizer"] = pattern.empty() ? byte_level : steps;
  json["post_processor"] = nullptr;
  json["decoder"] = {{"type", "ByteLevel"}};
  json["model"] = {{"type", "BPE"}, {"dropout", nullptr}, {"ignore_merges", false}};
  json["model"]["vocab"] = std::move(vocabulary);
  json["model"]["merges"] = std::move(merges);
  return json;
}

}  // namespace dynmo::data
