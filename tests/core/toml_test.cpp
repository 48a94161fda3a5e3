// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/toml.h"

#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/rng.h"

namespace dynmo {
namespace {

struct Item {
  std::int64_t step = 0;
  std::vector<std::int64_t> ranks = {};
};
struct Sample {
  int count = 1;
  std::int64_t large = 2;
  double share = 0.5;
  bool on = false;
  std::string name = "a";
  std::vector<std::int64_t> list;
  Bytes memory{5};
  double latency_s = 0;
  double bandwidth = 1;
  std::vector<Item> items;
};

std::vector<TomlKey> keys_of(Item& item) {
  return {{"item.step", &item.step}, {"item.ranks", &item.ranks}};
}

std::vector<TomlKey> keys_of(Sample& s) {
  const TomlTables items = {
      .clear = [&s] { s.items.clear(); },
      .add = [&s] { return keys_of(s.items.emplace_back()); },
      .all =
          [&s] {
            std::vector<std::vector<TomlKey>> all;
            for (Item& item : s.items) all.push_back(keys_of(item));
            return all;
          },
  };
  return {{"one.count", &s.count},
          {"one.large", &s.large},
          {"one.share", &s.share},
          {"one.on", &s.on},
          {"two.name", &s.name},
          {"two.list", &s.list},
          {"two.memory", &s.memory},
          {"two.latency", TomlSeconds{&s.latency_s}},
          {"two.bandwidth", TomlBandwidth{&s.bandwidth}},
          {"item", items}};
}

std::string error_of(const std::string& text) {
  Sample sample;
  const auto done = apply_toml(keys_of(sample), text, "x.toml");
  return done.has_value() ? "" : done.error().message;
}

TEST(Toml, ReadsEveryKindOfField) {
  Sample s;
  const auto done = apply_toml(keys_of(s), R"(
[one]
count = 3
large = 5000000000
share = 1
on = true
[two]
name = "b"
list = [1, 2]
memory = "80GiB"
latency = "20us"
bandwidth = "50GB/s"
[[item]]
step = 4
ranks = [7]
[[item]]
step = 5
)",
                               "x.toml");
  ASSERT_TRUE(done.has_value()) << done.error().message;
  EXPECT_EQ(s.count, 3);
  EXPECT_EQ(s.large, 5'000'000'000);
  EXPECT_EQ(s.share, 1.0);
  EXPECT_TRUE(s.on);
  EXPECT_EQ(s.name, "b");
  EXPECT_EQ(s.list, (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(s.memory, Bytes{std::int64_t{80} << 30});
  EXPECT_DOUBLE_EQ(s.latency_s, 20e-6);
  EXPECT_DOUBLE_EQ(s.bandwidth, 50e9);
  ASSERT_EQ(s.items.size(), 2U);
  EXPECT_EQ(s.items[0].ranks, (std::vector<std::int64_t>{7}));
  EXPECT_EQ(s.items[1].step, 5);
}

TEST(Toml, WrongUnitsAndTypesNameLineKeyAndWhatWasWanted) {
  EXPECT_EQ(error_of("[two]\nmemory = \"80 Gb\"\n"),
            "x.toml:2: two.memory is '80 Gb', wanted bytes, such as \"80GiB\", \"512 MB\" or a "
            "whole number of them");
  EXPECT_EQ(error_of("[two]\nlatency = \"20 meters\"\n"),
            "x.toml:2: two.latency is '20 meters', wanted a time, such as \"20us\", \"1.5 s\" or a "
            "number of seconds");
  EXPECT_EQ(error_of("[two]\nbandwidth = \"400Gb/s\"\n"),
            "x.toml:2: two.bandwidth is '400Gb/s', wanted a bandwidth, such as \"50GB/s\" "
            "(bytes, not bits), or inf");
  EXPECT_EQ(error_of("[two]\nname = \"a\\u0000b\"\n"),
            "x.toml:2: two.name is \"a\\u0000b\", wanted a string without the character \\u0000");
  EXPECT_EQ(error_of("[one]\ncount = 3000000000\n"),
            "x.toml:2: one.count is 3000000000, wanted a whole number of at most 2147483647");
  EXPECT_EQ(error_of("[item]\nstep = 1\n"),
            "x.toml:1: item is a table, wanted tables, such as [[item]]");
  EXPECT_EQ(error_of("[[item]]\nstop = 1\n"),
            "x.toml:2: 'item.stop' is not a known key, did you mean 'item.step'?");
  EXPECT_EQ(error_of("[two]\nnothing_like_it = 1\n"),
            "x.toml:2: 'two.nothing_like_it' is not a known key, known are two.name, "
            "two.list, two.memory, two.latency, two.bandwidth");
  EXPECT_EQ(error_of("[elsewhere]\nkey = 1\n"),
            "x.toml:2: 'elsewhere.key' is not a known key, known are one, two, item");
}

TEST(Toml, UnknownTablesAreErrorsEvenIfEmpty) {
  EXPECT_EQ(error_of("[thre]\n").substr(0, 36), "x.toml:1: 'thre' is not a known key,");
  EXPECT_EQ(error_of("[one]\n"), "");
}

TEST(Toml, WhatIsWrittenReadsBackToTheSame) {
  Sample s;
  s.share = 0.1 + 0.2;
  s.name = "with \"quotes\" and \\";
  s.bandwidth = std::numeric_limits<double>::infinity();
  s.latency_s = 1;
  s.items = {{.step = 3, .ranks = {1, 2}}, {.step = 4}};
  const std::string text = to_toml(keys_of(s));
  Sample back;
  const auto done = apply_toml(keys_of(back), text, "x.toml");
  ASSERT_TRUE(done.has_value()) << done.error().message << "\n" << text;
  EXPECT_EQ(to_toml(keys_of(back)), text);
  EXPECT_EQ(back.share, s.share);
  EXPECT_EQ(back.items[0].ranks, s.items[0].ranks);
}

TEST(Toml, SettingsTakeArraysOfTables) {
  Sample s;
  const std::vector<std::string> flags = {"item=[{step=9}]", "two.memory=1KiB", "two.latency=3us"};
  const auto done = apply_toml_settings(keys_of(s), flags, "one.count=1");
  ASSERT_TRUE(done.has_value()) << done.error().message;
  ASSERT_EQ(s.items.size(), 1U);
  EXPECT_EQ(s.items[0].step, 9);
  EXPECT_EQ(s.memory, Bytes{1024});
}

// Nested as deep as bytes allow: an error, and no stack is exhausted.
TEST(Toml, DeepAndLongTextIsAnErrorAndNoCrash) {
  std::string dots = "a";
  for (int i = 0; i < 100'000; ++i) dots += ".a";
  EXPECT_NE(error_of(dots + " = 1"), "");
  EXPECT_NE(error_of("[" + dots + "]"), "");
  EXPECT_NE(error_of("a = " + std::string(100'000, '[')), "");
  EXPECT_NE(error_of(std::string(kMaxTomlBytes + 1, ' ')), "");
}

TEST(Toml, MutatedTextNeverCrashes) {
  Sample s;
  s.items = {{.step = 3, .ranks = {1, 2}}};
  const std::string good = to_toml(keys_of(s));
  constexpr std::uint64_t kSeed = 5;
  Rng rng(kSeed);
  for (int i = 0; i < 3000; ++i) {
    std::string text = good;
    for (int changes = 0; changes < 3; ++changes) {
      text[rng.below(text.size())] = static_cast<char>(rng.below(256));
    }
    Sample read;
    const auto done = apply_toml(keys_of(read), text, "x.toml");
    if (done.has_value()) continue;
    EXPECT_EQ(done.error().code, ErrorCode::kBadInput) << "seed " << kSeed << ", case " << i;
    EXPECT_EQ(done.error().message.find('\n'), std::string::npos)
        << "seed " << kSeed << ", case " << i;
  }
}

TEST(TomlAuto, IsANumberOrAuto) {
  std::optional<double> share = 0.5;
  const std::vector<TomlKey> keys = {{"one.share", TomlAuto{&share}, between(0, 1, "or auto")}};
  EXPECT_EQ(to_toml(keys), "[one]\nshare = 0.5\n");
  ASSERT_TRUE(apply_toml_settings(keys, std::vector<std::string>{"one.share=auto"}, "a.b=c"));
  EXPECT_FALSE(share.has_value());
  EXPECT_TRUE(check_values(keys));
  EXPECT_EQ(to_toml(keys), "[one]\nshare = \"auto\"\n");
  ASSERT_TRUE(apply_toml(keys, "[one]\nshare = 2\n", "f"));
  EXPECT_EQ(share, 2);
  EXPECT_EQ(check_values(keys).error().message, "one.share is 2, wanted 0 to 1 or auto");
  ASSERT_TRUE(apply_toml(keys, "[one]\nshare = \"auto\"\n", "f"));
  EXPECT_FALSE(share.has_value());
  EXPECT_EQ(apply_toml(keys, "[one]\nshare = \"often\"\n", "f").error().message,
            "f:2: one.share is 'often', wanted a finite number or \"auto\"");
}

}  // namespace
}  // namespace dynmo
