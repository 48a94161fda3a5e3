// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <set>

#include "dynmo/core/check.h"
#include "dynmo/core/digest.h"
#include "dynmo/core/files.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/core/nearest.h"
#include "dynmo/core/rng.h"
#include "dynmo/core/units.h"

namespace dynmo {
namespace {

TEST(Error, MessagesAreOneLine) {
  EXPECT_EQ(
      make_error(ErrorCode::kBadInput, "key '{}' is odd", "a\nb\r\x1b\tc\x7f\xC3\xA9").message,
      "key 'a b   c \xC3\xA9' is odd");
}

TEST(Expected, HoldsAValueOrAnErrorAndRefusesTheOther) {
  const Expected<int> good = 3;
  const Expected<int> bad = make_error(ErrorCode::kInfeasible, "no plan for {} ranks", 4);
  EXPECT_EQ(*good, 3);
  EXPECT_EQ(bad.error().message, "no plan for 4 ranks");
  EXPECT_EQ(exit_code(bad.error().code), 3);
  EXPECT_THROW((void)bad.value(), CheckFailure);
  EXPECT_THROW((void)good.error(), CheckFailure);
}

TEST(Check, NamesConditionRankAndStep) {
  check_context() = {.rank = 2, .step = 7};
  try {
    DYNMO_CHECK(1 > 2, "one above two, got {}", 1);
    FAIL();
  } catch (const CheckFailure& failure) {
    const std::string what = failure.what();
    EXPECT_NE(what.find("one above two, got 1"), std::string::npos) << what;
    EXPECT_NE(what.find("rank 2, step 7"), std::string::npos) << what;
  }
  check_context() = {};
}

// Known answers of the Random123 distribution (kat_vectors, philox4x32-10).
TEST(Rng, PhiloxMatchesItsPublishedVectors) {
  using Words = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox(0, {0, 0, 0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~0ULL, {~0U, ~0U, ~0U, ~0U}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox(0x299f31d0a4093822, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Rng, BelowIsInRangeAndReachesEveryValue) {
  Rng rng(mix_key({1, 2}));
  std::set<std::uint64_t> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(rng.below(7));
  EXPECT_EQ(seen.size(), 7U);
  EXPECT_EQ(*seen.rbegin(), 6U);
}

TEST(Rng, KeysDependOnOrder) { EXPECT_NE(mix_key({1, 2}), mix_key({2, 1})); }

TEST(Rng, MomentsAreThoseOfTheDistributions) {
  Rng rng(5);
  double sum = 0;
  double squares = 0;
  double uniform = 0;
  constexpr int kDraws = 200000;
  for (int i = 0; i < kDraws; ++i) {
    const double x = rng.normal();
    sum += x;
    squares += x * x;
    uniform += rng.uniform();
  }
  EXPECT_NEAR(sum / kDraws, 0, 0.01);
  EXPECT_NEAR(squares / kDraws, 1, 0.02);
  EXPECT_NEAR(uniform / kDraws, 0.5, 0.005);
}

TEST(Digest, OfPiecesEqualsOfTheWhole) {
  Digester digester;
  digester.update("layer ");
  digester.update("3");
  EXPECT_EQ(digester.digest(), digest_of("layer 3"));
  EXPECT_NE(digest_of("layer 3"), digest_of("layer 4"));
  EXPECT_EQ(digest_of("layer 3").hex().size(), 32U);
}

TEST(Nearest, FindsTheWordMeant) {
  const std::vector<std::string> known = {"micro_batches", "sequence", "seed"};
  EXPECT_EQ(nearest("mirco_batch", known), "micro_batches");
  EXPECT_EQ(nearest("zzzzzz", known), "");
  EXPECT_EQ(suggestion("zzzzzz", known), ", known are micro_batches, sequence, seed");
}

TEST(Units, PrintForPeople) {
  EXPECT_EQ(format_bytes(Bytes{64 << 20}), "64.0 MiB");
  EXPECT_EQ(format_bytes(Bytes{512}), "512 B");
  EXPECT_EQ(format_seconds(0.00125), "1.25 ms");
  EXPECT_EQ(to_nanoseconds(1e-9 * 2.6).count(), 3);
}

TEST(Files, WriteDurablyReplacesTheWholeFile) {
  const auto folder = std::filesystem::temp_directory_path() / "dynmo-files-test";
  std::filesystem::remove_all(folder);
  ASSERT_TRUE(make_directories(folder));
  const auto path = folder / "a.txt";
  ASSERT_TRUE(write_file_durably(path, "long content"));
  ASSERT_TRUE(write_file_durably(path, "short"));
  EXPECT_EQ(*read_file(path), "short");
  EXPECT_FALSE(std::filesystem::exists(folder / "a.txt.new"));
  const auto missing = read_file(folder / "none");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kBadInput);
  std::filesystem::remove_all(folder);
}

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

}  // namespace
}  // namespace dynmo
