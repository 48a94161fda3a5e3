// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/gather.h"

#include <gtest/gtest.h>

#include <cmath>

#include "dynmo/transport/in_process.h"

namespace dynmo::transport {
namespace {

TEST(Gather, ReturnsTextsOfUnequalLengthsByRank) {
  const auto status = run_ranks(3, [](Transport& transport) -> Expected<void> {
    const std::vector<std::string> expected = {"", "x", "xyz"};
    DYNMO_ASSIGN(const auto texts, gather_texts(transport, 3, expected[transport.rank().index()]));
    EXPECT_EQ(texts, expected);
    DYNMO_ASSIGN(const auto nothing, gather_texts(transport, 3, ""));
    EXPECT_EQ(nothing, std::vector<std::string>(3));
    return {};
  });
  EXPECT_TRUE(status.has_value()) << status.error().message;
}

TEST(Gather, ReturnsJsonByRankAndTheFirstThatIsNotNull) {
  const auto status = run_ranks(3, [](Transport& transport) -> Expected<void> {
    const std::vector<Json> expected = {nullptr, {{"x", 0.1}, {"y", "\n"}}, Json::array({1, 2})};
    const Json& mine = expected[transport.rank().index()];
    DYNMO_ASSIGN(const auto values, gather_json(transport, 3, mine, "a value"));
    EXPECT_EQ(values, expected);
    DYNMO_ASSIGN(const Json first, first_json(transport, 3, mine, "a value"));
    EXPECT_EQ(first, expected[1]);
    DYNMO_ASSIGN(const Json nothing, first_json(transport, 3, nullptr, "a value"));
    EXPECT_TRUE(nothing.is_null());
    DYNMO_ASSIGN(const auto replaced, gather_json(transport, 3, "\xff", "a value"));
    EXPECT_EQ(replaced.front(), "\xef\xbf\xbd");
    return {};
  });
  EXPECT_TRUE(status.has_value()) << status.error().message;
}

TEST(Gather, ReturnsNumbersByRankBitForBit) {
  const auto status = run_ranks(3, [](Transport& transport) -> Expected<void> {
    const std::vector<std::vector<double>> expected = {{0.1, -0.0}, {1e-310, 2}, {1e300, -3}};
    DYNMO_ASSIGN(const auto numbers,
                 gather_numbers(transport, 3, expected[transport.rank().index()]));
    EXPECT_EQ(numbers, expected);
    EXPECT_TRUE(std::signbit(numbers[0][1]));
    return {};
  });
  EXPECT_TRUE(status.has_value()) << status.error().message;
}

TEST(Gather, AgreesOnEqualTextsAndNamesTheFirstRankThatDiffers) {
  const auto status = run_ranks(3, [](Transport& transport) -> Expected<void> {
    EXPECT_TRUE(agree(transport, 3, "plan", "0-3 4-7").has_value());
    const auto differs = agree(transport, 3, "plan", transport.rank() == Member(2) ? "a" : "b");
    const bool other = transport.rank() == Member(2);
    EXPECT_TRUE(!differs && differs.error().code == ErrorCode::kInternal);
    if (!differs) {
      const std::string text = other ? "rank 2 derived plan " : "derived plan ";
      EXPECT_NE(differs.error().message.find(text), std::string::npos) << differs.error().message;
      EXPECT_TRUE(differs.error().message.find(other ? ", rank 0 derived " : ", rank 2 derived ") !=
                  std::string::npos)
          << differs.error().message;
    }
    return {};
  });
  EXPECT_TRUE(status.has_value()) << status.error().message;
}

}  // namespace
}  // namespace dynmo::transport
