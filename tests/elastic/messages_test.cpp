// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/messages.h"

#include <gtest/gtest.h>

#include "tests/elastic/message_examples.h"

namespace dynmo::elastic {
namespace {

TEST(Messages, ReadBackAsTheyWereWritten) {
  for (const Message& message : message_examples()) {
    const auto bytes = encode(message);
    ASSERT_TRUE(bytes.has_value());
    const auto again = decode(*bytes);
    ASSERT_TRUE(again.has_value()) << again.error().message;
    EXPECT_EQ(*again, message) << message.index();
  }
}

TEST(Messages, CutOffOrFollowedByMoreAreRefused) {
  for (const Message& message : message_examples()) {
    const std::string bytes = *encode(message);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      ASSERT_FALSE(decode(std::string_view(bytes).substr(0, size)).has_value()) << size;
    }
    EXPECT_FALSE(decode(bytes + '\0').has_value());
  }
}

TEST(Messages, ThatPromiseMoreThanTheyHaveAreRefusedBeforeAnythingIsAllocated) {
  std::string bytes = *encode(End{});
  bytes.replace(bytes.size() - 4, 4, "\xff\xff\xff\xff");  // the length of the reason
  const auto refused = decode(bytes);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
}

TEST(Messages, LongerThanAFrameAreNotMade) {
  const auto refused = encode(End{.ballot = {}, .reason = std::string(kFrameLimit, 'x')});
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
  EXPECT_FALSE(decode(std::string(kFrameLimit + 1, '\0')).has_value());
}

}  // namespace
}  // namespace dynmo::elastic
