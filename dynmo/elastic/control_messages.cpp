// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/control_messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>
#include <utility>

#include "dynmo/core/fields.h"

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

constexpr Limits kRankCount{.min = 1, .wanted = "1 or more"};
constexpr Limits kPort{.min = 0, .max = 65535, .wanted = "0 to 65535"};

bool has_ranks(RequestKind kind) {
  return kind == RequestKind::kPack || kind == RequestKind::kGrow;
}

std::string hex_of(MemberId id) { return fmt::format("{:016x}", id.value); }

Expected<MemberId> parse_id(std::string_view text) {
  MemberId id;
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), id.value, 16);
  if (fault == std::errc() && end == text.data() + text.size() && id != MemberId{}) return id;
  return make_error(ErrorCode::kBadInput, "is no id of a member");
}

// Converts a secret to a signed number and back, because whole numbers of JSON are signed.
std::int64_t signed_of(std::uint64_t secret) { return static_cast<std::int64_t>(secret); }
Expected<std::uint64_t> secret_of(std::int64_t number) {
  return static_cast<std::uint64_t>(number);
}

Expected<ErrorCode> code_of(int exit) {
  const auto found = std::ranges::find(kCodes, exit, exit_code);
  return found == kCodes.end() ? ErrorCode::kBadInput : *found;
}

Expected<RequestKind> parse_kind(std::string_view text) {
  for (const auto& [each, name] : kRequests) {
    if (name == text) return each;
  }
  return make_error(ErrorCode::kBadInput, "is not known here");
}

Expected<Json> parse_line(std::string_view line, std::size_t limit, const char* origin) {
  if (line.size() > limit) {
    return make_error(ErrorCode::kBadInput, "{} has {} bytes, wanted at most {}", origin,
                      line.size(), limit);
  }
  return parse_json(line, origin);
}

}  // namespace

void list_fields(IsA<Build> auto& build, auto& visit) {
  visit("program", build.program);
  visit("libtorch", build.libtorch);
  visit("instruction_set", build.instruction_set);
  visit("threads", build.threads, kRankCount);
  visit("config", build.config);
  visit("data", build.data);
}

void list_fields(IsA<Place> auto& place, auto& visit) {
  visit("generation", place.generation);
  visit("size", place.size, kRankCount);
  visit("rank", place.rank, kCount);
  visit("member", place.member, kCount);
  visit("address", place.address);
  visit("port", place.port, kPort);
  visit.mapped("secret", place.secret, signed_of, secret_of);
  visit.each("numbers", place.numbers,
             [](auto& number, auto& inner) { inner("number", number, kCount); });
}
void check_fields(const IsA<Place> auto& place, JsonObject& object) {
  if (place.rank.value >= place.size) object.fail("rank", "is not below the size");
  if (!place.numbers.empty() && std::ssize(place.numbers) != place.size) {
    object.fail("numbers", "is not one for each rank");
  }
}
Json to_json(const Place& place) { return write_list(place); }
void read_fields(JsonObject& object, Place& place) { read_list(object, place); }

void list_fields(IsA<Member> auto& member, auto& visit) {
  visit.mapped("id", member.id, hex_of, parse_id);
  visit("number", member.number, kCount);
  visit("host", member.host);
  visit("pid", member.pid);
  visit.left_out("processes", member.processes, "");
  visit("address", member.address);
}
Json to_json(const Member& member) { return write_list(member); }
void read_fields(JsonObject& object, Member& member) { read_list(object, member); }

void list_fields(IsA<View> auto& view, auto& visit) {
  visit("generation", view.generation);
  visit("members", view.members);
}
Json to_json(const View& view) { return write_list(view); }
void read_fields(JsonObject& object, View& view) { read_list(object, view); }

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
      Part{"the instruction set",
           "join from a machine with the run's, and with its ATEN_CPU_CAPABILITY if it has one",
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

void list_fields(IsA<Request> auto& request, auto& visit) {
  visit.format(kFormat);
  visit.mapped("request", request.kind, name, parse_kind);
  visit("secret", request.secret);
  if (has_ranks(request.kind)) visit("ranks", request.ranks, kRankCount);
  if (request.kind == RequestKind::kDrain) visit("member", request.member, kCount);
  if (request.kind == RequestKind::kJoin) {
    visit("newcomer", request.newcomer);
    visit("build", request.build);
  }
}

std::string to_line(const Request& request) { return write_list(request).dump() + "\n"; }

Expected<Request> parse_request(std::string_view line) {
  DYNMO_ASSIGN(const Json json, parse_line(line, kMaxRequest, "the request"));
  return parse_fields<Request>(json, "the request");
}

Reply refusal(const Error& why) { return {.code = why.code, .done = false, .text = why.message}; }

void list_fields(IsA<Reply> auto& reply, auto& visit) {
  visit.format(kFormat);
  visit("done", reply.done);
  visit("text", reply.text);
  if (!reply.done) visit.mapped("code", reply.code, exit_code, code_of);
  visit.left_out("again", reply.again, false);
  visit("leader", reply.leader);
  visit.any("status", reply.status);
  visit("standby", reply.standby, kCount);
  visit("place", reply.place);
}

std::string to_line(const Reply& reply) {
  return write_list(reply).dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Expected<Reply> parse_reply(std::string_view line) {
  DYNMO_ASSIGN(const Json json, parse_line(line, kMaxReply, "the answer"));
  return parse_fields<Reply>(json, "the answer");
}

}  // namespace dynmo::elastic
