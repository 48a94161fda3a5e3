// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/allowed.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "dynmo/core/toml.h"

namespace dynmo {
namespace {

TEST(Allowed, RangesAreInTheMessage) {
  EXPECT_EQ(text_of(between(1, 16777216)), "1 to 16777216");
  EXPECT_EQ(text_of(at_least(0, "(0: never)")), "0 or more (0: never)");
  EXPECT_EQ(text_of(above(0)), "above 0");
  EXPECT_EQ(text_of(above_to(0, 0.5)), "above 0 and at most 0.5");
  EXPECT_EQ(text_of(from_below(0, 1)), "0 to below 1");
  EXPECT_EQ(check_allowed("a.b", std::int64_t{0}, between(1, 9)).error().message,
            "a.b is 0, wanted 1 to 9");
}

TEST(Allowed, EndsBelongToARangeUnlessTheyAreLeftOut) {
  const auto holds = [](double value, const Range& range) {
    return check_allowed("a", value, range).has_value();
  };
  EXPECT_TRUE(holds(1, between(1, 2)) && holds(2, between(1, 2)));
  EXPECT_FALSE(holds(0, above(0)));
  EXPECT_FALSE(holds(1, from_below(0, 1)));
  EXPECT_TRUE(holds(1, above_to(0, 1)));
  EXPECT_FALSE(holds(std::nan(""), between(0, 1)));
  EXPECT_FALSE(holds(std::nan(""), at_least(0)));
}

TEST(Allowed, NamesGetTheNearest) {
  const Allowed names = Names{"stop", "skip"};
  EXPECT_TRUE(check_allowed("a", std::string_view("skip"), names));
  EXPECT_EQ(check_allowed("a", std::string_view("skib"), names).error().message,
            "a is 'skib', wanted stop or skip, did you mean 'skip'?");
}

enum class Color { kRed, kGreen };

TEST(TomlChoice, IsReadByNameAndWritten) {
  constexpr std::array<std::string_view, 2> kNames = {"red", "green"};
  Color color = Color::kRed;
  const std::vector<TomlKey> keys = {{"one.color", toml_choice(&color, kNames)}};
  ASSERT_TRUE(apply_toml(keys, "[one]\ncolor = \"green\"\n", "f"));
  EXPECT_EQ(color, Color::kGreen);
  EXPECT_EQ(to_toml(keys), "[one]\ncolor = 'green'\n");
  EXPECT_EQ(apply_toml(keys, "[one]\ncolor = \"gren\"\n", "f").error().message,
            "f:2: one.color is 'gren', wanted red or green, did you mean 'green'?");
}

}  // namespace
}  // namespace dynmo
