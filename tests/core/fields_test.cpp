// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/fields.h"

#include <gtest/gtest.h>

namespace dynmo {
namespace {

struct FieldsId {
  std::uint64_t value = 0;
  friend bool operator==(const FieldsId&, const FieldsId&) = default;
};

struct FieldsSample {
  double share = 0.5;
  int count = 0;
  std::optional<std::uint16_t> port = {};
  std::int64_t late = 0;
  std::vector<FieldsId> ids = {};
  bool flag = false;
  friend bool operator==(const FieldsSample&, const FieldsSample&) = default;
};

constexpr Limits kFieldsShare{
    .min = 0, .max = 1, .wanted = "above 0, at most 1", .above_min = true};

std::string as_text(bool flag) { return flag ? "on" : "off"; }
Expected<bool> as_flag(const std::string& text) {
  if (text == "on" || text == "off") return text == "on";
  return make_error(ErrorCode::kBadInput, "is no switch");
}

}  // namespace

void list_fields(IsA<FieldsSample> auto& sample, auto& visit) {
  visit.optional("share", sample.share, kFieldsShare);
  visit("count", sample.count, kCount);
  visit("port", sample.port);
  visit.left_out("late", sample.late, 7);
  visit("ids", sample.ids);
  visit.mapped("flag", sample.flag, as_text, as_flag);
}

namespace {

std::string fault_of(const char* text) {
  const auto read = parse_fields<FieldsSample>(Json::parse(text), "s.json", "/samples/0");
  return read ? "" : read.error().message;
}

TEST(Fields, AreWrittenInTheOrderOfTheList) {
  FieldsSample sample{.count = 3, .late = 7, .ids = {{4}, {5}}, .flag = true};
  EXPECT_EQ(write_list(sample).dump(), R"({"share":0.5,"count":3,"ids":[4,5],"flag":"on"})");
  sample.port = 80;
  sample.late = 0;
  EXPECT_EQ(write_list(sample).dump(),
            R"({"share":0.5,"count":3,"port":80,"late":0,"ids":[4,5],"flag":"on"})");
  const auto read = parse_fields<FieldsSample>(write_list(sample), "s.json");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, sample);
}

TEST(Fields, ThatAreAbsentGetTheirFallback) {
  const auto read =
      parse_fields<FieldsSample>(Json::parse(R"({"count":0,"ids":[],"flag":"off"})"), "s.json");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, (FieldsSample{.late = 7}));
}

TEST(Fields, RefusalsNameThePlaceAndWhatIsWanted) {
  EXPECT_EQ(fault_of(R"({"ids":[],"flag":"on"})"), "s.json: /samples/0/count is missing");
  EXPECT_EQ(fault_of(R"({"share":0})"), "s.json: /samples/0/share is 0, wanted above 0, at most 1");
  EXPECT_EQ(fault_of(R"({"count":4294967296})"),
            "s.json: /samples/0/count is 4294967296, wanted 0 or more");
  EXPECT_EQ(fault_of(R"({"count":1,"port":65536})"),
            "s.json: /samples/0/port is 65536, wanted 0 to 65535");
  EXPECT_EQ(fault_of(R"({"count":1,"ids":[1,-2]})"),
            "s.json: /samples/0/ids/1 is -2, wanted a whole number, 0 or more");
  EXPECT_EQ(fault_of(R"({"count":1,"ids":[],"flag":"up"})"),
            "s.json: /samples/0/flag is no switch");
  EXPECT_EQ(fault_of(R"({"count":1,"ids":[],"flag":"on","shar":1})")
                .find("s.json: /samples/0/shar is not a known key"),
            0U);
}

}  // namespace
}  // namespace dynmo
