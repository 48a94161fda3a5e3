// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/json.h"

#include <gtest/gtest.h>

#include <string>

namespace dynmo {
namespace {

TEST(Json, ErrorsNameFileAndPointer) {
  const auto json = parse_json(R"({"layers": [{"forward_s": "x", "nmae": 1}]})", "p.json");
  ASSERT_TRUE(json);
  JsonObject root(*json, "p.json");
  auto layers = root.objects("layers");
  ASSERT_EQ(layers.size(), 1U);
  (void)layers[0].number("forward_s");
  EXPECT_EQ(layers[0].finish().error().message,
            "p.json: /layers/0/forward_s is \"x\", wanted a finite number");
}

TEST(Json, UnknownKeyIsAnErrorWithTheNearestOne) {
  const auto json = parse_json(R"({"nmae": "a", "name": "b"})", "p.json");
  JsonObject root(*json, "p.json");
  EXPECT_EQ(root.string("name"), "b");
  EXPECT_EQ(root.finish().error().message,
            "p.json: /nmae is not a known key, did you mean 'name'?");
}

TEST(Json, ANumberTooLargeForAnIntegerIsRefused) {
  const auto json = parse_json(R"({"n": 18446744073709551615})", "p.json");
  JsonObject root(*json, "p.json");
  (void)root.integer("n");
  EXPECT_FALSE(root.finish());
}

TEST(Json, NestingWithoutEndIsRefused) {
  const std::string deep(200000, '[');
  EXPECT_FALSE(parse_json(deep, "p.json"));
  const auto closed = parse_json("{\"a\": " + deep + std::string(200000, ']') + "}", "p.json");
  ASSERT_FALSE(closed);
  EXPECT_EQ(closed.error().message, "p.json: wanted JSON of at most 64 levels");
}

TEST(Json, SyntaxErrorsAreOneLine) {
  const auto json = parse_json("{\"a\": 1,\n}", "p.json");
  ASSERT_FALSE(json);
  EXPECT_EQ(json.error().message.find('\n'), std::string::npos);
  EXPECT_NE(json.error().message.find("line 2"), std::string::npos) << json.error().message;
}

TEST(Json, AsManyLevelsAsAreAllowedAreRead) {
  EXPECT_TRUE(parse_json(std::string(64, '[') + std::string(64, ']'), "p.json"));
  EXPECT_FALSE(parse_json(std::string(65, '[') + std::string(65, ']'), "p.json"));
}

TEST(Json, AKeyGivenTwiceIsAnErrorWithItsPlace) {
  const auto in_array =
      parse_json(R"({"layers": [{"name": "a"}, {"name": "b", "x": [], "name": "c"}]})", "p.json");
  ASSERT_FALSE(in_array);
  EXPECT_EQ(in_array.error().message,
            "p.json: /layers/1/name is given twice, wanted each key once");
  EXPECT_EQ(parse_json(R"({"a/b~": 1, "a/b~": 1})", "p.json").error().message,
            "p.json: /a~1b~0 is given twice, wanted each key once");
}

TEST(Json, AKeyGivenTwiceAmongManyIsFound) {
  for (const int count : {14, 15, 16, 17, 18, 200}) {
    std::string text = "{";
    for (int i = 0; i < count; ++i) text += fmt::format("\"k{}\": [[], {{}}, 1], ", i);
    EXPECT_TRUE(parse_json(text + "\"new\": {}}", "p.json"));
    for (const int again : {0, count / 2, count - 1}) {
      const auto twice = parse_json(text + fmt::format("\"k{}\": 2}}", again), "p.json");
      ASSERT_FALSE(twice) << count << ", " << again;
      EXPECT_EQ(twice.error().message,
                fmt::format("p.json: /k{} is given twice, wanted each key once", again));
    }
  }
}

TEST(Json, TheSameKeyInDifferentObjectsIsNoFault) {
  EXPECT_TRUE(parse_json(R"({"a": {"a": [{"a": 1}, {"a": 2}]}, "b": {"a": 1}})", "p.json"));
}

TEST(Json, AnEndlessFileIsRefusedByItsSize) {
  const auto endless = read_json("/dev/zero");
  ASSERT_FALSE(endless);
  EXPECT_EQ(endless.error().message, "'/dev/zero' has more than 256.0 MiB, wanted a smaller file");
}

TEST(Json, ANumberThatJsonDoesNotHaveIsNamedWithItsKey) {
  const std::vector<std::array<std::string, 3>> cases = {
      {R"({"a": 1, "rope_theta": Infinity})", "/rope_theta", "Infinity"},
      {R"({"a": {"b": [1, {"c": -Infinity}]}})", "/a/b/1/c", "-Infinity"},
      {R"({"a": [1, 2, NaN, 3]})", "/a/2", "NaN"},
      {R"([NaN])", "/0", "NaN"},
      {R"({"done": {"x": 1}, "next": NaN})", "/next", "NaN"},
      {"NaN", "/", "NaN"}};
  for (const auto& [text, place, number] : cases) {
    const auto parsed = parse_json(text, "config.json");
    ASSERT_FALSE(parsed) << text;
    EXPECT_EQ(parsed.error().message,
              fmt::format("config.json: {} is {}, which JSON does not have: wanted a finite number "
                          "or null",
                          place, number));
  }
  for (const char* text : {R"({"a": Infinite})", R"({"a": nan})", R"({"a": N)", R"({"a": -})"}) {
    EXPECT_NE(parse_json(text, "f").error().message.find("wanted JSON: "), std::string::npos);
  }
}

TEST(Json, AFileThatIsSomethingElseIsNamed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "a Git LFS pointer"},
      {"<!DOCTYPE html><html>", "an HTML page"},
      {std::string("\x1f\x8b\x08\0", 4), "compressed by gzip"},
      {"PK\x03\x04", "a zip archive"}};
  for (const auto& [text, name] : cases) {
    EXPECT_NE(parse_json(text, "f").error().message.find("wanted JSON: it is " + name),
              std::string::npos)
        << parse_json(text, "f").error().message;
  }
}

}  // namespace
}  // namespace dynmo
