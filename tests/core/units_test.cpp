// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/units.h"

#include <gtest/gtest.h>

#include <string>

namespace dynmo {
namespace {

TEST(ParseBytes, TakesDecimalAndBinaryUnits) {
  EXPECT_EQ(parse_bytes("80GiB").value(), Bytes{std::int64_t{80} << 30});
  EXPECT_EQ(parse_bytes("80 GB").value(), Bytes{80'000'000'000});
  EXPECT_EQ(parse_bytes(" 1.5KiB ").value(), Bytes{1536});
  EXPECT_EQ(parse_bytes("512").value(), Bytes{512});
  EXPECT_EQ(parse_bytes("0B").value(), Bytes{0});
  EXPECT_EQ(parse_bytes("2e3 kB").value(), Bytes{2'000'000});
}

TEST(ParseBytes, RefusesOtherUnitsAndNumbers) {
  for (const char* text : {"", "GiB", "80 Gb", "80gib", "-1GB", "nan", "inf", "8 GiB B", "1e30PiB",
                           "5000 PiB", "0x10"}) {
    const auto bytes = parse_bytes(text);
    ASSERT_FALSE(bytes.has_value()) << text << " is " << bytes.value().value;
    EXPECT_EQ(bytes.error().code, ErrorCode::kBadInput);
    EXPECT_EQ(bytes.error().message.substr(0, 2 + std::string(text).size()),
              "'" + std::string(text) + "'");
  }
}

TEST(ParseSeconds, TakesUnitsOfTime) {
  EXPECT_DOUBLE_EQ(parse_seconds("20us").value(), 20e-6);
  EXPECT_DOUBLE_EQ(parse_seconds("1.5 ms").value(), 1.5e-3);
  EXPECT_DOUBLE_EQ(parse_seconds("85ns").value(), 85e-9);
  EXPECT_DOUBLE_EQ(parse_seconds("3").value(), 3);
  EXPECT_DOUBLE_EQ(parse_seconds("2min").value(), 120);
  EXPECT_DOUBLE_EQ(parse_seconds("0.5h").value(), 1800);
  for (const char* text : {"", "us", "-1s", "3 sec", "1 GB"}) {
    EXPECT_FALSE(parse_seconds(text).has_value()) << text;
  }
}

TEST(ParseBytesPerSecond, TakesBytesAndRefusesBits) {
  EXPECT_DOUBLE_EQ(parse_bytes_per_second("450GB/s").value(), 450e9);
  EXPECT_DOUBLE_EQ(parse_bytes_per_second("1 GiB/s").value(), 1073741824.0);
  EXPECT_DOUBLE_EQ(parse_bytes_per_second("1e9").value(), 1e9);
  for (const char* text : {"400Gb/s", "/s", "", "GB/s", "1GB/h"}) {
    EXPECT_FALSE(parse_bytes_per_second(text).has_value()) << text;
  }
}

// Printed durations are read back.
TEST(ParseSeconds, ReadsWhatIsPrinted) {
  for (const double seconds : {3.2, 1.25e-3, 85e-9, 20e-6}) {
    EXPECT_DOUBLE_EQ(parse_seconds(format_seconds(seconds)).value(), seconds);
  }
  EXPECT_EQ(parse_bytes(format_bytes(Bytes{std::int64_t{64} << 20})).value(),
            Bytes{std::int64_t{64} << 20});
}

}  // namespace
}  // namespace dynmo
