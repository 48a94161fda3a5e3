// SPDX-License-Identifier: Apache-2.0
#pragma once

// These are the requests to a run's leader from outside and its answers: one line of JSON each
// ("dynmo-control-1"). `dynmo ctl` asks and commands; a process that wants to become a rank says
// what it is and waits for its place.

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

// Longer lines are refused before they are read to their end.
inline constexpr std::size_t kMaxRequest = 64 << 10;
inline constexpr std::size_t kMaxReply = 1 << 20;

// Two processes must agree on these values to compute the same bits.
struct Build {
  std::string program;          // digest of the program's file
  std::string libtorch;         // its version
  std::string instruction_set;  // that libtorch's kernels use
  int threads = 1;              // of tensor operations
  std::string config;           // digest of the settings that decide what is computed
  std::string data;             // digest of the data
  friend bool operator==(const Build&, const Build&) = default;
};
// kBadInput with the first difference: what the newcomer has, what the run has, what to change.
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
  int ranks = 0;   // kPack: onto so many ranks of a replica; kGrow: so many more
  int member = 0;  // kDrain
  // kJoin.
  Member newcomer = {};
  Build build = {};
};
[[nodiscard]] std::string to_line(const Request& request);
// kBadInput: no such line; what is wrong with it, without its text.
[[nodiscard]] Expected<Request> parse_request(std::string_view line);

// For those who exchange members and views as JSON.
[[nodiscard]] Json to_json(const Member& member);
[[nodiscard]] Expected<Member> parse_member(JsonObject& object);
[[nodiscard]] Json to_json(const View& view);
[[nodiscard]] Expected<View> parse_view(const Json& json, std::string_view origin);

// Where a newcomer's place in the next group is, and how it gets there.
struct Place {
  Generation generation = 0;
  int size = 0;  // of the group
  WorldRank rank = {};
  int member = 0;
  std::string address;  // where the group's first rank waits for the others
  std::uint16_t port = 0;
  std::uint64_t secret = 0;  // that it wants to hear
  friend bool operator==(const Place&, const Place&) = default;
};

[[nodiscard]] Json to_json(const Place& place);
[[nodiscard]] Expected<Place> parse_place(JsonObject& object);

struct Reply {
  ErrorCode code = ErrorCode::kBadInput;  // where it is not done
  bool done = false;
  std::string text;                    // one line for people; kConfig: the settings as TOML
  bool again = false;                  // it is not done, as another rank leads now: ask that one
  std::optional<JobFile> leader = {};  // with `again`: where it listens; else job.json says it
  Json status = nullptr;               // kStatus
  std::optional<int> standby = {};  // kJoin: taken as this member, its place comes in a later line
  std::optional<Place> place = {};  // kJoin
};
[[nodiscard]] Reply refusal(const Error& why);
[[nodiscard]] std::string to_line(const Reply& reply);
[[nodiscard]] Expected<Reply> parse_reply(std::string_view line);

}  // namespace dynmo::elastic
