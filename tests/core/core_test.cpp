// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <set>

#include "dynmo/core/check.h"
#include "dynmo/core/digest.h"
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
  EXPECT_EQ(nearest("sede", known), "seed");  // two letters changed places
  // A third of the letters is more than a slip.
  EXPECT_EQ(nearest("gpu", std::vector<std::string>{"cpu"}), "");
  EXPECT_EQ(nearest("--gpus", std::vector<std::string>{"--out", "--ranks"}), "");
  EXPECT_EQ(nearest("--rank", std::vector<std::string>{"--out", "--ranks"}), "--ranks");
  EXPECT_EQ(suggestion("zzzzzz", known), ", known are micro_batches, sequence, seed");
}

TEST(Units, PrintForPeople) {
  EXPECT_EQ(format_bytes(Bytes{64 << 20}), "64.0 MiB");
  EXPECT_EQ(format_bytes(Bytes{512}), "512 B");
  EXPECT_EQ(format_seconds(0.00125), "1.25 ms");
  EXPECT_EQ(to_nanoseconds(1e-9 * 2.6).count(), 3);
}

}  // namespace
}  // namespace dynmo
