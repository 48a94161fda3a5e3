// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "dynmo/observe/table.h"

namespace dynmo::observe {
namespace {

TEST(Chart, DrawsSeriesOnOneScale) {
  const std::vector<Series> series = {{"imbalance", {0, 1, 2, 4}}, {"bubble", {4, 2, 0, 2}}};
  EXPECT_EQ(chart(series, {.width = 10, .height = 2}),
            "imbalance\n"
            "        4 │   █\n"
            "        0 │ ▄██\n"
            "bubble\n"
            "        4 │█\n"
            "        0 │██ █\n"
            "           step 0 to 3\n");
}

TEST(Chart, AveragesMoreValuesThanColumns) {
  const std::vector<Series> series = {{"x", {0, 2, 4, 4, 1, 3}}};
  EXPECT_EQ(chart(series, {.width = 3, .height = 1, .first = 10}),
            "x\n"
            "        4 │▂█▄\n"
            "           step 10 to 15\n");
}

TEST(Chart, WhatIsNotFiniteIsAGap) {
  const double nan = std::nan("");
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<Series> series = {{"x", {1, nan, infinity, 1}}};
  EXPECT_EQ(chart(series, {.width = 4, .height = 1}),
            "x\n"
            "        1 │█  █\n"
            "           step 0 to 3\n");
}

TEST(Chart, SmallValuesStillShow) {
  EXPECT_NE(chart(std::vector<Series>{{"x", {1e-9, 1}}}, {.width = 4, .height = 1}).find("▁█"),
            std::string::npos);
}

TEST(Chart, EdgesDrawSomethingSensible) {
  EXPECT_EQ(chart({}), "");
  EXPECT_EQ(chart(std::vector<Series>{{"none", {}}}, {.height = 1}), "none\n        0 │\n");
  const std::string flat = chart(std::vector<Series>{{"flat", {0, 0}}}, {.height = 1});
  EXPECT_EQ(flat, "flat\n        0 │\n           step 0 to 1\n");
  const std::string extreme =
      chart(std::vector<Series>{{"x", {-1e308, 1e308}}}, {.width = 2, .height = 1});
  EXPECT_NE(extreme.find("█"), std::string::npos);
}

}  // namespace
}  // namespace dynmo::observe
