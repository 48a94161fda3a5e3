// SPDX-License-Identifier: Apache-2.0
// A rank for the tests of processes that die: `rank_program SCENARIO`, started with a rank's
// environment, or `rank_program launch N SCENARIO`, which starts N of them with our launcher.
//
// Once its group is up a rank prints "ready RANK PID" to stderr; a scenario that does not end by
// itself waits to be killed. With SAY_WAITING in its environment it prints "joins RANK", and
// "waiting RANK PID" when it first waits for another to join.
#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "dynmo/c10d/c10d_transport.h"
#include "dynmo/process/launcher.h"
#include "tests/runtime/resources.h"

namespace dynmo::c10d {
namespace {

using Bytes = std::vector<std::byte>;
using Clock = std::chrono::steady_clock;
constexpr std::size_t kMiB = 1 << 20;

void say_ready(const Group& group) { fmt::print(stderr, "ready {} {}\n", group.rank(), getpid()); }

transport::Member neighbour(const Group& group, int distance) {
  return transport::Member((group.rank().value + group.size() + distance) % group.size());
}

Bytes pattern(int rank, std::size_t size) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>(i * 31 + (i >> 12) + static_cast<std::size_t>(rank) * 7);
  }
  return bytes;
}

Expected<void> require(bool condition, const std::string& what) {
  if (condition) return {};
  return make_error(ErrorCode::kInternal, "wanted {}", what);
}

// To the right, from the left, in pieces.
Expected<void> exchange(Group& group, transport::Tag tag, std::span<const std::byte> mine,
                        std::span<std::byte> theirs, std::size_t piece) {
  std::vector<std::unique_ptr<transport::Operation>> operations;
  for (std::size_t at = 0; at < mine.size(); at += piece) {
    operations.push_back(group.receive(neighbour(group, -1), tag,
                                       theirs.subspan(at, std::min(piece, theirs.size() - at))));
  }
  for (std::size_t at = 0; at < mine.size(); at += piece) {
    operations.push_back(
        group.send(neighbour(group, 1), tag, mine.subspan(at, std::min(piece, mine.size() - at))));
  }
  Expected<void> result;
  for (auto& operation : operations) {
    auto done = operation->wait();
    if (!done && result) result = done;
  }
  return result;
}

Expected<void> messages(Group& group) {
  const Bytes mine = pattern(group.rank().value, 1000);
  DYNMO_ASSIGN(const auto all, transport::all_gather(group, 3, mine));
  for (int rank = 0; rank < group.size(); ++rank) {
    DYNMO_TRY(
        require(all[static_cast<std::size_t>(rank)] == pattern(rank, 1000), "what each gave"));
  }
  // Two tags, waited for in the other order than posted, the largest tag among them.
  constexpr transport::Tag kLargest = 0x7fffffff;
  std::byte low{};
  std::byte high{};
  const std::byte one{1};
  const std::byte two{2};
  const auto from_low = group.receive(neighbour(group, -1), 0, {&low, 1});
  const auto from_high = group.receive(neighbour(group, -1), kLargest, {&high, 1});
  const auto to_high = group.send(neighbour(group, 1), kLargest, {&two, 1});
  const auto to_low = group.send(neighbour(group, 1), 0, {&one, 1});
  for (const auto* operation : {&from_high, &from_low, &to_low, &to_high}) {
    DYNMO_TRY((*operation)->wait());
  }
  DYNMO_TRY(require(low == one && high == two, "each message on its tag"));
  // In order on one tag.
  Bytes numbers(100);
  Bytes received(100);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<std::byte>(i);
  DYNMO_TRY(exchange(group, 9, numbers, received, 1));
  return require(received == numbers, "messages of a tag in their order");
}

Expected<void> transfer(Group& group) {
  const Bytes mine = pattern(group.rank().value, 64 * kMiB);
  const Bytes wanted = pattern(neighbour(group, -1).value, 64 * kMiB);
  for (const std::size_t piece : {kMiB, 64 * kMiB}) {
    Bytes theirs(mine.size());
    const auto begin = Clock::now();
    DYNMO_TRY(exchange(group, 1, mine, theirs, piece));
    const std::chrono::duration<double, std::milli> time = Clock::now() - begin;
    DYNMO_TRY(require(theirs == wanted, "the bytes of the left neighbour"));
    if (group.rank() == transport::Member(0)) {
      fmt::print("64 MiB in pieces of {} MiB: {:.1f} ms\n", piece / kMiB, time.count());
    }
  }
  return {};
}

// Each waits for a message that is never sent.
Expected<void> rest(Group& group) {
  say_ready(group);
  std::byte byte{};
  return group.receive(neighbour(group, 1), 5, {&byte, 1})->wait();
}

// 64 MiB are on the wire at all times.
Expected<void> stream(Group& group) {
  const Bytes mine(64 * kMiB);
  Bytes theirs(64 * kMiB);
  DYNMO_TRY(exchange(group, 1, mine, theirs, mine.size()));
  say_ready(group);
  while (true) DYNMO_TRY(exchange(group, 1, mine, theirs, mine.size()));
}

// The same in pieces of 1 MiB, as migration sends them.
Expected<void> stream_pieces(Group& group) {
  const Bytes mine(64 * kMiB);
  Bytes theirs(64 * kMiB);
  DYNMO_TRY(exchange(group, 1, mine, theirs, kMiB));
  say_ready(group);
  while (true) DYNMO_TRY(exchange(group, 1, mine, theirs, kMiB));
}

// No message is outstanding: it is noticed between computations. Says so once it has gone on for
// five heartbeats behind a pause.
Expected<void> compute(Group& group) {
  constexpr std::chrono::milliseconds kPause{500};
  auto last = Clock::now();  // before a pause can begin
  auto back = last;
  bool paused = false;
  say_ready(group);
  while (true) {
    if (const auto failure = group.failure()) return *failure;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const auto now = Clock::now();
    if (now - last > kPause) {
      back = now;
      paused = true;
    }
    if (paused && now - back > kPause) {
      fmt::print(stderr, "went on {}\n", group.rank());
      paused = false;
    }
    last = now;
  }
}

// Rank 1 has a reason of its own to end.
Expected<void> fail(Group& group) {
  if (group.rank() != transport::Member(1)) return rest(group);
  return make_error(ErrorCode::kNoCheckpoint, "no checkpoint in 'runs/x' verifies");
}

// Rank 1 ends without a message to any other.
Expected<void> vanish(Group& group) {
  if (group.rank() == transport::Member(1)) _exit(7);
  return rest(group);
}

// Rank 1 forgets a receive.
Expected<void> drop(Group& group) {
  if (group.rank() != transport::Member(1)) return rest(group);
  std::byte byte{};
  (void)group.receive(transport::Member(0), 4, {&byte, 1});
  return *group.failure();
}

// Rank 1 ends with its group neither left nor failed.
Expected<void> walk_away(Group& group) {
  if (group.rank() != transport::Member(1)) return rest(group);
  return {};
}

// One rank: all_gather is its own bytes.
Expected<void> alone(Group& group) {
  DYNMO_ASSIGN(const auto all, transport::all_gather(group, 3, pattern(0, 10)));
  return require(all.size() == 1 && all[0] == pattern(0, 10), "its own bytes");
}

// Ranks leave at different times; nobody's early end is a loss.
Expected<void> leave_late(Group& group) {
  std::this_thread::sleep_for(std::chrono::milliseconds(150) * group.rank().value);
  return messages(group);
}

// Groups one after the other through one store; the last of them without rank 2, which dies while
// 64 MiB are on the wire.
Expected<void> rebuild(std::unique_ptr<Group>& group, GroupOptions options) {
  std::ptrdiff_t at_first = 0;
  for (int round = 0; round < 5; ++round) {
    DYNMO_TRY(messages(*group));
    DYNMO_TRY(group->leave());
    options.store = group->store();
    ++options.generation;
    group.reset();
    DYNMO_ASSIGN(group, join_group(options));
    if (round == 0) at_first = runtime::testing::resources();
  }
  DYNMO_TRY(require(runtime::testing::resources_fall_to(at_first),
                    "no descriptor or thread left by a group"));
  const Bytes mine(64 * kMiB);
  Bytes theirs(64 * kMiB);
  DYNMO_TRY(exchange(*group, 1, mine, theirs, mine.size()));
  const auto killer = group->rank() != transport::Member(2) ? std::jthread() : std::jthread([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    (void)raise(SIGKILL);
  });
  while (exchange(*group, 1, mine, theirs, mine.size())) {
  }
  const auto begin = Clock::now();
  DYNMO_TRY(require(group->failure()->code == ErrorCode::kPeerLost &&
                        group->failure()->message.starts_with("rank 2 was lost: "),
                    "the loss of rank 2, got " + group->failure()->message));
  options.store = group->store();
  ++options.generation;
  options.size = 2;
  group.reset();
  const std::chrono::duration<double, std::milli> closed = Clock::now() - begin;
  DYNMO_ASSIGN(group, join_group(options));
  const std::chrono::duration<double, std::milli> joined = Clock::now() - begin;
  DYNMO_TRY(messages(*group));
  DYNMO_TRY(require(runtime::testing::resources_fall_to(at_first - 1),
                    "no descriptor or thread left by the failed group"));
  if (group->rank() == transport::Member(0)) {
    fmt::print("closed after {:.1f} ms, rebuilt after {:.1f} ms\n", closed.count(), joined.count());
  }
  return {};
}

// The same ranks in a group that has met as groups do when a run changes its size.
Expected<void> change_group(std::unique_ptr<Group>& group, GroupOptions options) {
  options.beside = group->size();
  options.own_address = group->address();
  ++options.generation;
  struct Place {
    std::uint64_t secret = 0;
    std::uint16_t port = 0;
  } place;
  if (options.rank == WorldRank(0)) {
    DYNMO_ASSIGN(options.meeting, open_meeting(options));
    place = {.secret = place_of(*options.meeting).secret, .port = place_of(*options.meeting).port};
  }
  DYNMO_ASSIGN(const auto all,
               transport::all_gather(*group, 3, std::as_bytes(std::span(&place, 1))));
  std::memcpy(&place, all[0].data(), sizeof place);
  options.meeting_place = {.address = "127.0.0.1", .port = place.port, .secret = place.secret};
  DYNMO_ASSIGN(auto next, join_group(options));
  DYNMO_TRY(group->leave());
  group = std::move(next);
  return {};
}

// Rank 1 waits for a message that rank 0 sends after a pause, or never.
Expected<void> wait(Group& group) {
  say_ready(group);
  std::byte byte{1};
  if (group.rank() != transport::Member(0)) {
    return group.receive(transport::Member(0), 5, {&byte, 1})->wait();
  }
  const char* pause = std::getenv("PAUSE_MILLISECONDS");
  if (pause == nullptr) return compute(group);
  std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(pause)));
  return group.send(transport::Member(1), 5, {&byte, 1})->wait();
}

int run_rank(const std::string& scenario) {
  const std::map<std::string, Expected<void> (*)(Group&)> scenarios = {
      {"messages", messages},   {"transfer", transfer},     {"rest", rest},
      {"stream", stream},       {"pieces", stream_pieces},  {"compute", compute},
      {"fail", fail},           {"vanish", vanish},         {"drop", drop},
      {"walk-away", walk_away}, {"leave-late", leave_late}, {"alone", alone},
      {"wait", wait},           {"wait-beside", wait}};
  std::unique_ptr<Group> group;
  const auto run = [&]() -> Expected<void> {
    DYNMO_ASSIGN(const auto environment, process::rank_environment());
    if (!environment) return make_error(ErrorCode::kBadInput, "not started as a rank");
    GroupOptions options = group_options(*environment);
    if (const char* seconds = std::getenv("JOIN_SECONDS")) {
      options.join_timeout = std::chrono::seconds(std::atoi(seconds));
    }
    if (const char* some = std::getenv("SILENCE_MILLISECONDS")) {
      options.silence = std::chrono::milliseconds(std::atoi(some));
    }
    if (const char* some = std::getenv("MESSAGE_MILLISECONDS")) {
      options.message_timeout = std::chrono::milliseconds(std::atoi(some));
    }
    if (std::getenv("SAY_WAITING") != nullptr) {  // asked for whenever it waits
      fmt::print(stderr, "joins {}\n", options.rank);
      options.give_up = [rank = options.rank, said = false]() mutable -> std::optional<Error> {
        if (!std::exchange(said, true)) fmt::print(stderr, "waiting {} {}\n", rank, getpid());
        return std::nullopt;
      };
    }
    DYNMO_ASSIGN(group, join_group(options));
    if (scenario == "wait-beside") DYNMO_TRY(change_group(group, options));
    DYNMO_TRY(scenario == "rebuild" ? rebuild(group, options) : scenarios.at(scenario)(*group));
    if (scenario == "walk-away" && group->rank() == transport::Member(1)) return {};
    DYNMO_TRY(group->leave());
    if (group->rank() == transport::Member(0)) fmt::print("done\n");
    return {};
  };
  const auto result = run();
  if (result) return 0;
  fmt::print(stderr, "dynmo: {}\n", result.error().message);
  if (group) group->abort(result.error());
  if (std::getenv("DESTROY") != nullptr) {
    group.reset();
    return exit_code(result.error().code);
  }
  quit(exit_code(result.error().code));
}

int launch(int ranks, const std::string& scenario) {
  process::LaunchOptions options;
  options.ranks = ranks;
  options.command = {"/proc/self/exe", scenario};
  const auto code = process::launch_ranks(options);
  if (code) return *code;
  fmt::print(stderr, "dynmo: {}\n", code.error().message);
  return exit_code(code.error().code);
}

}  // namespace
}  // namespace dynmo::c10d

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "launch") == 0) {
    dynmo::c10d::quit(dynmo::c10d::launch(std::atoi(argv[2]), argv[3]));
  }
  if (argc == 2) return dynmo::c10d::run_rank(argv[1]);
  fmt::print(stderr, "usage: rank_program [launch N] SCENARIO\n");
  return 2;
}
