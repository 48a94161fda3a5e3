// SPDX-License-Identifier: Apache-2.0
#pragma once

// Requests from outside to a run's leader, and its answers: one line of JSON each
// ("dynmo-control-1"). `dynmo ctl` asks and commands. A process that wants to become a rank
// describes itself and waits for its place.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/elastic/job_file.h"
#include "dynmo/elastic/member.h"

namespace dynmo::elastic {

// Limits of a line. A longer line is refused before it is read to its end.
inline constexpr std::size_t kMaxRequest = 64 << 10;
inline constexpr std::size_t kMaxReply = 1 << 20;

// The values that two processes must share to compute the same bits.
struct Build {
  std::string program;          // digest of the program's file
  std::string libtorch;         // version
  std::string instruction_set;  // kernels::instruction_set_name()
  int threads = 1;              // of tensor operations
  std::string config;           // digest of the settings that decide what is computed
  std::string data;             // digest of the data
  friend bool operator==(const Build&, const Build&) = default;
};
// Compares two builds. Fails with kBadInput at the first difference, and names the newcomer's
// value, the run's value, and what to change.
[[nodiscard]] Expected<void> check_same(const Build& newcomer, const Build& run);

enum class RequestKind {
  kStatus,
  kPack,
  kGrow,
  kDrain,
  kRelease,
  kCheckpoint,
  kStop,
  kConfig,
  kJoin
};
[[nodiscard]] std::string_view name(RequestKind kind);

struct Request {
  RequestKind kind = RequestKind::kStatus;
  std::string secret = {};
  int ranks = 0;   // kPack: target for a replica; kGrow: number of new ranks
  int member = 0;  // kDrain
  // For kJoin.
  Member newcomer = {};
  Build build = {};
};
[[nodiscard]] std::string to_line(const Request& request);
// Parses a request. Returns kBadInput for other lines. The error says what is wrong, without the
// line's text.
[[nodiscard]] Expected<Request> parse_request(std::string_view line);

// Converts members and views to JSON and back, for code that exchanges them.
[[nodiscard]] Json to_json(const Member& member);
void read_fields(JsonObject& object, Member& member);
[[nodiscard]] Json to_json(const View& view);
void read_fields(JsonObject& object, View& view);

// The place of a newcomer in the next group, and how it gets there.
struct Place {
  Generation generation = 0;
  int size = 0;  // of the group
  WorldRank rank = {};
  int member = 0;
  std::string address;  // where the group's first rank waits for the others
  std::uint16_t port = 0;
  std::uint64_t secret = 0;  // secret that the newcomer must send
  // The numbers of the group's ranks in messages to users. Empty if they are known already.
  std::vector<int> numbers = {};
  friend bool operator==(const Place&, const Place&) = default;
};

[[nodiscard]] Json to_json(const Place& place);
void read_fields(JsonObject& object, Place& place);

struct Reply {
  ErrorCode code = ErrorCode::kBadInput;  // reason, if not done
  bool done = false;
  std::string text;  // one line for the user; kConfig: the settings as TOML
  // Set if another rank leads now, and the request was not carried out. Send it to that rank.
  bool again = false;
  // With `again`: where the next leader listens. Without a value, job.json has it.
  std::optional<JobFile> leader = {};
  Json status = nullptr;  // kStatus
  // For kJoin: the number of the member as which the process waits. Its place comes in a later
  // line.
  std::optional<int> standby = {};
  std::optional<Place> place = {};  // kJoin
};
[[nodiscard]] Reply refusal(const Error& why);
[[nodiscard]] std::string to_line(const Reply& reply);
[[nodiscard]] Expected<Reply> parse_reply(std::string_view line);

}  // namespace dynmo::elastic
