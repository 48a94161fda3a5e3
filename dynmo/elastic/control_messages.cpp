// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/control_messages.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <limits>
#include <system_error>
#include <utility>

namespace dynmo::elastic {
namespace {

constexpr std::string_view kFormat = "dynmo-control-1";

constexpr std::array kRequests = {
    std::pair{RequestKind::kStatus, std::string_view("status")},
    std::pair{RequestKind::kPack, std::string_view("pack")},
    std::pair{RequestKind::kGrow, std::string_view("grow")},
    std::pair{RequestKind::kDrain, std::string_view("drain")},
    std::pair{RequestKind::kRelease, std::string_view("release")},
    std::pair{RequestKind::kCheckpoint, std::string_view("checkpoint")},
    std::pair{RequestKind::kStop, std::string_view("stop")},
    std::pair{RequestKind::kConfig, std::string_view("config")},
    std::pair{RequestKind::kJoin, std::string_view("join")},
};

constexpr std::array kCodes = {ErrorCode::kBadInput,     ErrorCode::kInfeasible,
                               ErrorCode::kNoCheckpoint, ErrorCode::kPeerLost,
                               ErrorCode::kInterrupted,  ErrorCode::kInternal};

int small_number(JsonObject& object, const std::string& key, int least) {
  const std::int64_t value = object.integer(key);
  if (value < least || value > std::numeric_limits<int>::max()) {
    object.fail(key, fmt::format("is {}, wanted {} or more", value, least));
    return least;
  }
  return static_cast<int>(value);
}

bool has_ranks(RequestKind kind) {
  return kind == RequestKind::kPack || kind == RequestKind::kGrow;
}

Json to_json(const Build& build) {
  return {{"program", build.program},
          {"libtorch", build.libtorch},
          {"instruction_set", build.instruction_set},
          {"threads", build.threads},
          {"config", build.config},
          {"data", build.data}};
}

Expected<Build> parse_build(JsonObject& object) {
  Build build{.program = object.string("program"),
              .libtorch = object.string("libtorch"),
              .instruction_set = object.string("instruction_set"),
              .threads = small_number(object, "threads", 1),
              .config = object.string("config"),
              .data = object.string("data")};
  DYNMO_TRY(object.finish());
  return build;
}

Expected<Json> parse_line(std::string_view line, std::size_t limit, const char* origin) {
  if (line.size() > limit) {
    return make_error(ErrorCode::kBadInput, "{} has {} bytes, wanted at most {}", origin,
                      line.size(), limit);
  }
  return parse_json(line, origin);
}

}  // namespace

Json to_json(const Place& place) {
  Json numbers = Json::array();
  for (const int number : place.numbers) numbers.push_back({{"number", number}});
  return {{"generation", place.generation},
          {"size", place.size},
          {"rank", place.rank.value},
          {"member", place.member},
          {"address", place.address},
          {"port", place.port},
          {"secret", static_cast<std::int64_t>(place.secret)},
          {"numbers", numbers}};
}

Expected<Place> parse_place(JsonObject& object) {
  Place place;
  place.generation = object.integer("generation");
  place.size = small_number(object, "size", 1);
  place.rank = WorldRank(small_number(object, "rank", 0));
  place.member = small_number(object, "member", 0);
  place.address = object.string("address");
  const int port = small_number(object, "port", 0);
  if (port > std::numeric_limits<std::uint16_t>::max()) object.fail("port", "is no port");
  place.port = static_cast<std::uint16_t>(port);
  place.secret = static_cast<std::uint64_t>(object.integer("secret"));
  if (place.rank.value >= place.size) object.fail("rank", "is not below the size");
  for (JsonObject& each : object.objects("numbers")) {
    place.numbers.push_back(small_number(each, "number", 0));
    DYNMO_TRY(each.finish());
  }
  if (!place.numbers.empty() && std::ssize(place.numbers) != place.size) {
    object.fail("numbers", "is not one for each rank");
  }
  DYNMO_TRY(object.finish());
  return place;
}

Json to_json(const Member& member) {
  return {{"id", fmt::format("{:016x}", member.id.value)},
          {"number", member.number},
          {"host", member.host},
          {"pid", member.pid},
          {"address", member.address}};
}

Expected<Member> parse_member(JsonObject& object) {
  Member member;
  const std::string id = object.string("id");
  const auto [end, fault] = std::from_chars(id.data(), id.data() + id.size(), member.id.value, 16);
  if (fault != std::errc() || end != id.data() + id.size() || member.id == MemberId{}) {
    object.fail("id", "is no id of a member");
  }
  member.number = small_number(object, "number", 0);
  member.host = object.string("host");
  member.pid = object.integer("pid");
  member.address = object.string("address");
  DYNMO_TRY(object.finish());
  return member;
}

Json to_json(const View& view) {
  Json members = Json::array();
  for (const Member& member : view.members) members.push_back(to_json(member));
  return {{"generation", view.generation}, {"members", std::move(members)}};
}

Expected<View> parse_view(const Json& json, std::string_view origin) {
  JsonObject object(json, std::string(origin));
  View view;
  view.generation = object.integer("generation");
  for (JsonObject& each : object.objects("members")) {
    DYNMO_ASSIGN(Member member, parse_member(each));
    view.members.push_back(std::move(member));
  }
  DYNMO_TRY(object.finish());
  return view;
}

Expected<void> check_same(const Build& newcomer, const Build& run) {
  struct Part {
    const char* what;
    const char* change;
    const std::string& here;
    const std::string& there;
  };
  const std::string here_threads = std::to_string(newcomer.threads);
  const std::string there_threads = std::to_string(run.threads);
  const std::array parts = {
      Part{"the program", "start the program that the run was started with", newcomer.program,
           run.program},
      Part{"libtorch", "use the run's libtorch", newcomer.libtorch, run.libtorch},
      Part{"the instruction set", "join from a machine with the run's, or set ATEN_CPU_CAPABILITY",
           newcomer.instruction_set, run.instruction_set},
      Part{"the number of threads", "start it with as many", here_threads, there_threads},
      Part{"the settings", "leave out what changes them (--set, --config)", newcomer.config,
           run.config},
      Part{"the data", "give the run's data with --data", newcomer.data, run.data},
  };
  for (const Part& part : parts) {
    if (part.here == part.there) continue;
    return make_error(ErrorCode::kBadInput,
                      "{} of the process that wants to join is {}, that of the run {}: {}, as all "
                      "ranks of a run compute the same bits",
                      part.what, part.here, part.there, part.change);
  }
  return {};
}

std::string_view name(RequestKind kind) {
  for (const auto& [each, text] : kRequests) {
    if (each == kind) return text;
  }
  return "";
}

std::string to_line(const Request& request) {
  Json json = {{"format", kFormat}, {"request", name(request.kind)}, {"secret", request.secret}};
  if (has_ranks(request.kind)) json["ranks"] = request.ranks;
  if (request.kind == RequestKind::kDrain) json["member"] = request.member;
  if (request.kind == RequestKind::kJoin) {
    json["newcomer"] = to_json(request.newcomer);
    json["build"] = to_json(request.build);
  }
  return json.dump() + "\n";
}

Expected<Request> parse_request(std::string_view line) {
  DYNMO_ASSIGN(const Json json, parse_line(line, kMaxRequest, "the request"));
  JsonObject object(json, "the request");
  object.expect_format(kFormat);
  Request request;
  const std::string kind = object.string("request");
  request.secret = object.string("secret");
  bool known = false;
  for (const auto& [each, text] : kRequests) {
    if (text != kind) continue;
    request.kind = each;
    known = true;
  }
  if (!known) object.fail("request", "is not known here");
  if (known && has_ranks(request.kind)) request.ranks = small_number(object, "ranks", 1);
  if (known && request.kind == RequestKind::kDrain) {
    request.member = small_number(object, "member", 0);
  }
  if (known && request.kind == RequestKind::kJoin) {
    auto newcomer = object.object("newcomer");
    auto build = object.object("build");
    if (!newcomer || !build) {
      object.fail(newcomer ? "build" : "newcomer", "is missing");
    } else {
      DYNMO_ASSIGN(request.newcomer, parse_member(*newcomer));
      DYNMO_ASSIGN(request.build, parse_build(*build));
    }
  }
  DYNMO_TRY(object.finish());
  return request;
}

Reply refusal(const Error& why) { return {.code = why.code, .done = false, .text = why.message}; }

std::string to_line(const Reply& reply) {
  Json json = {{"format", kFormat}, {"done", reply.done}, {"text", reply.text}};
  if (!reply.done) json["code"] = exit_code(reply.code);
  if (reply.again) json["again"] = true;
  if (reply.leader) json["leader"] = to_json(*reply.leader);
  if (!reply.status.is_null()) json["status"] = reply.status;
  if (reply.standby) json["standby"] = *reply.standby;
  if (reply.place) json["place"] = to_json(*reply.place);
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Expected<Reply> parse_reply(std::string_view line) {
  DYNMO_ASSIGN(const Json json, parse_line(line, kMaxReply, "the answer"));
  JsonObject object(json, "the answer");
  object.expect_format(kFormat);
  Reply reply;
  reply.done = object.boolean("done");
  reply.text = object.string("text");
  const std::int64_t code = object.integer("code", 0);
  for (const ErrorCode each : kCodes) {
    if (exit_code(each) == code) reply.code = each;
  }
  reply.again = object.boolean("again", false);
  if (auto leader = object.object("leader")) {
    DYNMO_ASSIGN(reply.leader, parse_job(*leader));
  }
  object.ignore("status");
  if (json.is_object() && json.contains("status")) reply.status = json["status"];
  if (json.is_object() && json.contains("standby")) {
    reply.standby = small_number(object, "standby", 0);
  }
  if (auto place = object.object("place")) {
    DYNMO_ASSIGN(reply.place, parse_place(*place));
  }
  DYNMO_TRY(object.finish());
  return reply;
}

}  // namespace dynmo::elastic
