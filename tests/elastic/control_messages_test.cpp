// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/control_messages.h"

#include <gtest/gtest.h>

#include <functional>

#include "dynmo/core/fields.h"

namespace dynmo::elastic {
namespace {

Member some_member() {
  return {.id = {0xFEDCBA9876543210ULL},
          .number = 9,
          .host = "node-3 \"ß\"",
          .pid = 123456789012,
          .address = "10.0.0.3:29500"};
}

Build some_build() {
  return {.program = "0123",
          .libtorch = "2.11.0",
          .instruction_set = "AVX2",
          .threads = 2,
          .config = "4567",
          .data = "89ab"};
}

Request join_request() {
  return {.kind = RequestKind::kJoin,
          .secret = "secret",
          .newcomer = some_member(),
          .build = some_build()};
}

// A line of the wire is one line, and a parser gets it without its end.
std::string_view without_end(std::string_view line) {
  EXPECT_TRUE(line.ends_with('\n'));
  line.remove_suffix(1);
  EXPECT_EQ(line.find('\n'), std::string_view::npos);
  return line;
}

TEST(ControlMessages, RequestsAreReadAsTheyWereWritten) {
  const std::vector<Request> requests = {
      {.kind = RequestKind::kStatus, .secret = "a"},
      {.kind = RequestKind::kPack, .secret = "b", .ranks = 3},
      {.kind = RequestKind::kGrow, .secret = "b", .ranks = 2},
      {.kind = RequestKind::kDrain, .secret = "c", .member = 0},
      {.kind = RequestKind::kRelease, .secret = "d"},
      {.kind = RequestKind::kCheckpoint, .secret = "line\nof \"two\""},
      {.kind = RequestKind::kStop, .secret = ""},
      {.kind = RequestKind::kConfig, .secret = "e"},
      join_request()};
  for (const Request& request : requests) {
    SCOPED_TRACE(name(request.kind));
    const std::string line = to_line(request);
    const auto read = parse_request(without_end(line));
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(read->kind, request.kind);
    EXPECT_EQ(read->secret, request.secret);
    EXPECT_EQ(read->ranks, request.ranks);
    EXPECT_EQ(read->member, request.member);
    EXPECT_EQ(read->newcomer, request.newcomer);
    EXPECT_EQ(read->build, request.build);
    EXPECT_EQ(to_line(*read), line);
  }
}

TEST(ControlMessages, RepliesAreReadAsTheyWereWritten) {
  const Place place{.generation = std::int64_t{1} << 40,
                    .size = 4,
                    .rank = WorldRank(3),
                    .member = 17,
                    .address = "node-0",
                    .port = 65535,
                    .secret = 0xfedcba9876543210};
  std::vector<Reply> replies(6);
  replies[0] = {.done = true, .text = "two\nlines", .status = Json{{"step", 3}}};
  replies[1] = {.done = true, .text = "waiting"};
  replies[1].standby = 17;
  replies[2] = {.done = true, .text = "join"};
  replies[2].place = place;
  replies[3] = {.done = true, .text = ""};
  replies[4] = refusal(Error{ErrorCode::kPeerLost, "another leads"});
  replies[4].again = true;
  replies[5] = replies[4];
  replies[5].leader = JobFile{.address = "node-1", .port = 4321, .host = "b", .pid = 7};
  for (const ErrorCode code :
       {ErrorCode::kBadInput, ErrorCode::kInfeasible, ErrorCode::kNoCheckpoint,
        ErrorCode::kPeerLost, ErrorCode::kInterrupted, ErrorCode::kInternal}) {
    replies.push_back(refusal(Error{code, "because"}));
  }
  for (const Reply& reply : replies) {
    const std::string line = to_line(reply);
    const auto read = parse_reply(without_end(line));
    ASSERT_TRUE(read) << line << read.error().message;
    EXPECT_EQ(read->done, reply.done);
    EXPECT_EQ(read->code, reply.code);
    EXPECT_EQ(read->text, reply.text);
    EXPECT_EQ(read->again, reply.again);
    EXPECT_EQ(read->leader, reply.leader);
    EXPECT_EQ(read->status, reply.status);
    EXPECT_EQ(read->standby, reply.standby);
    EXPECT_EQ(read->place, reply.place);
    EXPECT_EQ(to_line(*read), line);
  }
}

// In a run's answer, only text that people wrote may be no UTF-8.
TEST(ControlMessages, ATextThatIsNoUtf8IsSaidAllTheSame) {
  const std::string line = to_line(Reply{.done = true, .text = "a\xFFz"});
  const auto read = parse_reply(without_end(line));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->text, "a\xEF\xBF\xBDz");
}

TEST(ControlMessages, ViewsAreReadAsTheyWereWritten) {
  for (const View& view :
       {View(), View{.generation = 12, .members = {some_member(), {.id = {1}}}}}) {
    const auto read = parse_fields<View>(to_json(view), "a view");
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(*read, view);
  }
}

// A fault is one edit of a valid line's JSON, and what its refusal names.
struct Fault {
  std::function<void(Json&)> edit;
  std::string_view names;
};

template <typename Parse>
void expect_refusals(const std::string& line, Parse parse, const std::vector<Fault>& faults) {
  for (const Fault& fault : faults) {
    Json json = Json::parse(line);
    fault.edit(json);
    const std::string text = json.dump();
    const auto read = parse(text);
    ASSERT_FALSE(read) << text;
    EXPECT_EQ(read.error().code, ErrorCode::kBadInput) << text;
    EXPECT_NE(read.error().message.find(fault.names), std::string::npos)
        << text << ": " << read.error().message;
    EXPECT_EQ(read.error().message.find('\n'), std::string::npos) << read.error().message;
  }
}

TEST(ControlMessages, ARequestThatIsNoneIsRefusedByName) {
  expect_refusals(to_line(join_request()), parse_request,
                  {{[](Json& j) { j["format"] = "dynmo-control-2"; }, "format"},
                   {[](Json& j) { j.erase("format"); }, "format"},
                   {[](Json& j) { j["request"] = "dance"; }, "request"},
                   {[](Json& j) { j.erase("request"); }, "request"},
                   {[](Json& j) { j["secret"] = 3; }, "secret"},
                   {[](Json& j) { j.erase("secret"); }, "secret"},
                   {[](Json& j) { j.erase("newcomer"); }, "newcomer"},
                   {[](Json& j) { j.erase("build"); }, "build"},
                   {[](Json& j) { j["build"]["threads"] = 0; }, "threads"},
                   {[](Json& j) { j["build"]["threads"] = std::int64_t{1} << 40; }, "threads"},
                   {[](Json& j) { j["build"]["color"] = "red"; }, "color"},
                   {[](Json& j) { j["newcomer"]["id"] = "0000000000000000"; }, "id"},
                   {[](Json& j) { j["newcomer"]["id"] = "12x"; }, "id"},
                   {[](Json& j) { j["newcomer"]["id"] = ""; }, "id"},
                   {[](Json& j) { j["newcomer"]["id"] = "10000000000000000"; }, "id"},
                   {[](Json& j) { j["newcomer"]["number"] = -1; }, "number"},
                   {[](Json& j) { j["more"] = 1; }, "more"},
                   {[](Json& j) { j["ranks"] = 1; }, "ranks"}});
  expect_refusals(to_line(Request{.kind = RequestKind::kPack, .ranks = 2}), parse_request,
                  {{[](Json& j) { j["ranks"] = 0; }, "ranks"},
                   {[](Json& j) { j["ranks"] = -3; }, "ranks"},
                   {[](Json& j) { j["ranks"] = 1.5; }, "ranks"},
                   {[](Json& j) { j["ranks"] = std::int64_t{1} << 32; }, "ranks"},
                   {[](Json& j) { j.erase("ranks"); }, "ranks"}});
  expect_refusals(to_line(Request{.kind = RequestKind::kDrain, .member = 2}), parse_request,
                  {{[](Json& j) { j["member"] = -1; }, "member"},
                   {[](Json& j) { j.erase("member"); }, "member"},
                   {[](Json& j) { j["ranks"] = 1; }, "ranks"}});
  for (const std::string& text : {std::string(), std::string("{"), std::string("[]"),
                                  std::string("null"), std::string(kMaxRequest + 1, ' ')}) {
    EXPECT_FALSE(parse_request(text));
  }
}

TEST(ControlMessages, AReplyThatIsNoneIsRefusedByName) {
  Reply reply{.done = true, .text = "join"};
  reply.place = Place{.size = 2, .rank = WorldRank(1), .address = {}};
  reply.standby = 3;
  expect_refusals(to_line(reply), parse_reply,
                  {{[](Json& j) { j["format"] = "dynmo-control-0"; }, "format"},
                   {[](Json& j) { j["done"] = "yes"; }, "done"},
                   {[](Json& j) { j.erase("text"); }, "text"},
                   {[](Json& j) { j["place"]["rank"] = 2; }, "rank"},
                   {[](Json& j) { j["place"]["rank"] = -1; }, "rank"},
                   {[](Json& j) { j["place"]["size"] = 0; }, "size"},
                   {[](Json& j) { j["place"]["port"] = 65536; }, "port"},
                   {[](Json& j) { j["place"].erase("secret"); }, "secret"},
                   {[](Json& j) {
                      j["place"]["numbers"] = Json::array({{{"number", 7}}});
                    },
                    "numbers"},
                   {[](Json& j) { j["place"]["more"] = 1; }, "more"},
                   {[](Json& j) { j["standby"] = std::int64_t{1} << 32; }, "standby"},
                   {[](Json& j) { j["more"] = 1; }, "more"}});
  EXPECT_FALSE(parse_reply(std::string(kMaxReply + 1, ' ')));
}

TEST(ControlMessages, AnotherBuildIsRefusedByItsFirstDifference) {
  const Build run = some_build();
  EXPECT_TRUE(check_same(run, run));
  const std::vector<std::pair<std::function<void(Build&)>, std::string_view>> differences = {
      {[](Build& b) { b.program = "other"; }, "the program of"},
      {[](Build& b) { b.libtorch = "other"; }, "libtorch of"},
      {[](Build& b) { b.instruction_set = "other"; }, "the instruction set of"},
      {[](Build& b) { b.threads = 7; }, "the number of threads of"},
      {[](Build& b) { b.config = "other"; }, "the settings of"},
      {[](Build& b) { b.data = "other"; }, "the data of"}};
  Build all = run;
  for (auto each = differences.rbegin(); each != differences.rend(); ++each) {
    Build one = run;
    each->first(one);
    each->first(all);  // with all that come later
    for (const Build& newcomer : {one, all}) {
      const auto same = check_same(newcomer, run);
      ASSERT_FALSE(same);
      EXPECT_EQ(same.error().code, ErrorCode::kBadInput);
      EXPECT_TRUE(same.error().message.starts_with(each->second)) << same.error().message;
      EXPECT_NE(
          same.error().message.find(each->second == "the number of threads of" ? "7" : "other"),
          std::string::npos)
          << same.error().message;
    }
  }
}

}  // namespace
}  // namespace dynmo::elastic
