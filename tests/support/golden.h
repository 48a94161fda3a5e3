// SPDX-License-Identifier: Apache-2.0
#pragma once

// Files that an earlier commit has written, one or two for each format: tests/FOLDER/goldens. They
// show that a format has stayed the same. DYNMO_TESTS is the folder tests/.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/core/files.h"
#include "dynmo/core/json.h"

namespace dynmo {

using Rewrite = std::function<Expected<Json>(const Json&)>;

// Expects that `rewrite` reads and writes the file byte for byte.
inline void expect_rewritten(const std::string& name, const Rewrite& rewrite) {
  const auto text = read_file(std::filesystem::path(DYNMO_TESTS) / name);
  ASSERT_TRUE(text) << text.error().message;
  const auto json = parse_json(*text, name);
  ASSERT_TRUE(json) << json.error().message;
  const auto again = rewrite(*json);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->dump(2) + "\n", *text);
}

// The same for a file with a value in each line. `rewrite` gets a line with its newline.
inline void expect_lines_rewritten(
    const std::string& name,
    const std::function<Expected<std::string>(std::string_view line)>& rewrite) {
  const auto text = read_file(std::filesystem::path(DYNMO_TESTS) / name);
  ASSERT_TRUE(text) << text.error().message;
  for (std::size_t start = 0; start < text->size();) {
    const std::size_t end = text->find('\n', start) + 1;
    const std::string line = text->substr(start, end - start);
    const auto again = rewrite(line);
    ASSERT_TRUE(again) << again.error().message;
    EXPECT_EQ(*again, line);
    start = end;
  }
}

using ReadText = std::function<Expected<void>(const std::string&)>;

// Returns the texts with which `read` refuses the lines if one value of them has a fault. Each
// fault has its texts, and each text the places of the values: line, then JSON pointer. The last
// value of a list is tried.
inline std::string refusals_of(const std::vector<Json>& lines, const ReadText& read) {
  const std::vector<std::pair<std::string, std::optional<Json>>> faults = {
      {"removed", std::nullopt},
      {"null", nullptr},
      {"text", "text"},
      {"-1", -1},
      {"0.5", 0.5},
      {"3e9", 3000000000},
      {"true", true},
      {"[]", Json::array()},
      {"{}", Json::object()}};
  std::map<std::string, std::map<std::string, std::string>> places;
  const auto note = [&](const std::string& fault, std::size_t line, const std::string& pointer,
                        const Json& changed) {
    std::string text;
    for (std::size_t i = 0; i < lines.size(); ++i)
      text += (i == line ? changed : lines[i]).dump() + "\n";
    const auto result = read(text);
    std::string why = result ? "is read" : result.error().message;
    if (why.starts_with('/')) why.erase(0, why.rfind('/', why.find(": ")) + 1);  // a folder
    const std::size_t place = why.find(": " + pointer + " ");
    if (place != std::string::npos) why = why.substr(place + pointer.size() + 3);
    places[fault][why] += " " + std::to_string(line + 1) + pointer;
  };
  using Pointer = Json::json_pointer;
  std::function<void(std::size_t, const Pointer&)> visit = [&](std::size_t line,
                                                               const Pointer& pointer) {
    const Json& value = lines[line].at(pointer);
    if (!pointer.empty()) {
      for (const auto& [fault, other] : faults) {
        Json changed = lines[line];
        Json& parent = changed.at(pointer.parent_pointer());
        if (other) {
          changed.at(pointer) = *other;
        } else if (parent.is_object()) {
          parent.erase(pointer.back());
        } else {
          parent.erase(std::stoul(pointer.back()));
        }
        note(fault, line, pointer.to_string(), changed);
      }
    }
    if (value.is_object()) {
      Json changed = lines[line];
      changed.at(pointer)["unknown"] = 1;
      note("unknown key", line, pointer.to_string() + "/unknown", changed);
      for (const auto& each : value.items()) visit(line, pointer / each.key());
    } else if (value.is_array() && !value.empty()) {
      visit(line, pointer / (value.size() - 1));
    }
  };
  for (std::size_t line = 0; line < lines.size(); ++line) visit(line, Pointer());
  std::string all;
  for (const auto& [fault, texts] : places) {
    all += fault + "\n";
    for (const auto& [text, where] : texts) all += fmt::format("  {}\n   {}\n", text, where);
  }
  return all;
}

// Expects that `read` refuses faults in the file NAME, of one value or one in each line, with the
// texts of the file NAME.refusals.
inline void expect_refusals(const std::string& name, const ReadText& read) {
  const std::filesystem::path path = std::filesystem::path(DYNMO_TESTS) / name;
  const auto text = read_file(path);
  ASSERT_TRUE(text) << text.error().message;
  std::vector<Json> lines;
  std::istringstream each(*text);
  if (path.extension() == ".json") lines.push_back(Json::parse(*text));
  for (std::string line; path.extension() != ".json" && std::getline(each, line);) {
    lines.push_back(Json::parse(line));
  }
  const auto wanted = read_file(path.string() + ".refusals");
  ASSERT_TRUE(wanted) << wanted.error().message;
  EXPECT_EQ(refusals_of(lines, read), *wanted);
}

}  // namespace dynmo
