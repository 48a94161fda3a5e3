// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/effects.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace dynmo {
namespace {

// A table with a switch, a key below it, and one below that.
struct Options {
  bool enabled = false;
  std::string rule = "even";
  double share = 0.5;
  std::string path = {};
  std::int64_t count = 1;
};

std::vector<TomlKey> keys_of(Options& o) {
  std::vector<TomlKey> keys =
      only_if({when("t.enabled", Names{"true"})},
              {{"t.rule", &o.rule, Names{"even", "odd", "all"}},
               {"t.share", &o.share, between(0, 1), {when("t.rule", Names{"odd", "all"})}},
               {"t.path", &o.path},
               {"t.count",
                &o.count,
                {},
                {either(when_given("t.path", "a t.path"),
                        when("t.share", above(0.9), "t.share above 0.9"))}}});
  keys.insert(keys.begin(), {"t.enabled", &o.enabled});
  return keys;
}

std::string refusal(Options options) {
  Options defaults;
  const auto valid = check_effects(keys_of(options), keys_of(defaults));
  return valid ? "" : valid.error().message;
}

Options with_settings(Options options, const std::vector<std::string>& settings) {
  Options defaults;
  EXPECT_TRUE(
      apply_overrides([&] { return keys_of(options); }, keys_of(defaults), settings, "t.a=1"));
  return options;
}

TEST(Effects, AKeyWithoutEffectIsRefusedWithWhatMakesItIdleAndWhatToChange) {
  EXPECT_EQ(
      refusal({.rule = "odd"}),
      "t.rule is 'odd' with t.enabled = false, which does not use it: wanted t.enabled = true, "
      "or no t.rule");
  EXPECT_EQ(
      refusal({.enabled = true, .share = 0.1}),
      "t.share is 0.1 with t.rule = even, which does not use it: wanted t.rule = odd or all, or "
      "no t.share");
  EXPECT_EQ(
      refusal({.enabled = true, .count = 2}),
      "t.count is 2 with t.path = '' and t.share = 0.5, which does not use it: wanted a t.path "
      "or t.share above 0.9, or no t.count");
}

TEST(Effects, WhatActsOrIsAtItsDefaultIsAccepted) {
  EXPECT_EQ(refusal({}), "");
  EXPECT_EQ(refusal({.enabled = true, .rule = "all", .share = 0.1}), "");
  EXPECT_EQ(refusal({.enabled = true, .path = "p", .count = 2}), "");
  EXPECT_EQ(refusal({.enabled = true, .rule = "odd", .share = 0.95, .count = 2}), "");
  EXPECT_EQ(refusal({.enabled = false, .rule = "even", .share = 0.5}), "");
}

TEST(Effects, ASettingThatSwitchesATableOffResetsItsKeys) {
  const Options file = {.enabled = true, .rule = "odd", .share = 0.1};
  const Options off = with_settings(file, {"t.enabled=false"});
  EXPECT_EQ(off.rule, "even");
  EXPECT_EQ(off.share, 0.5);
  EXPECT_EQ(refusal(off), "");
}

TEST(Effects, ASettingThatIsItselfIdleStaysAndIsRefused) {
  const Options file = {.enabled = true, .rule = "odd", .share = 0.1};
  EXPECT_NE(refusal(with_settings(file, {"t.enabled=false", "t.share=0.2"})), "");
  // A key that was idle before is not excused.
  EXPECT_NE(refusal(with_settings({.rule = "odd"}, {"t.count=1"})), "");
  // A setting can give a key of the file its effect.
  EXPECT_EQ(refusal(with_settings({.rule = "odd"}, {"t.enabled=true"})), "");
}

TEST(Effects, ResetLeavesWhatActs) {
  Options options = {.enabled = true, .rule = "even", .share = 0.1, .path = "p", .count = 3};
  Options defaults;
  reset_idle(keys_of(options), keys_of(defaults));
  EXPECT_EQ(options.share, 0.5);
  EXPECT_EQ(options.count, 3);
  EXPECT_EQ(options.path, "p");
}

}  // namespace
}  // namespace dynmo
