// SPDX-License-Identifier: Apache-2.0
#pragma once

// Files that an earlier commit has written, one or two for each format: tests/FOLDER/goldens. They
// show that a format has stayed the same. DYNMO_TESTS is the folder tests/.

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <string_view>

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

}  // namespace dynmo
