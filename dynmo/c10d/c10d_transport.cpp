// SPDX-License-Identifier: Apache-2.0
#include "dynmo/c10d/c10d_transport.h"

#include <ATen/ATen.h>
#include <c10/util/Logging.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "dynmo/c10d/gloo_group_impl.h"
#include "dynmo/c10d/relay_store_impl.h"
#include "dynmo/c10d/store_impl.h"
#include "dynmo/core/check.h"
#include "dynmo/process/host_memory.h"
#include "dynmo/process/sockets.h"

namespace dynmo::c10d {

class Meeting {
 public:
  MeetingPlace place;
  std::shared_ptr<GroupState> state;
};

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kJoinPoll{10};
constexpr milliseconds kConnectTime{10000};     // to the plane of rank 0, which is there
constexpr const char* kUnknown = "-";           // address
constexpr milliseconds kAcknowledgeTime{1000};  // for other ranks to read why joining failed
constexpr milliseconds kBeyondSilence{1000};    // until silence is reported as a loss

std::string key_of(int rank) { return fmt::format("rank/{}", rank); }

// Returns the options of the watch. They do not hold `state`, because its destructor must not run
// on the plane's thread.
elastic::WatchOptions watch_options(const GroupOptions& options, const GroupState& state) {
  return {.generation = options.generation,
          .rank = options.rank,
          .size = options.size,
          .names = options.names,
          .on_verdict = [outstanding = state.outstanding](const Error& why) {
            outstanding->fail(why);
          }};
}

milliseconds verdict_time(const GroupOptions& options) { return options.silence + kBeyondSilence; }

// Listens on the plane, and returns where the other ranks find rank 0.
Expected<MeetingPlace> listen(const GroupOptions& options, GroupState& state) {
  DYNMO_TRY(options.plane->listen(state.address));
  state.watch = options.plane->open(watch_options(options, state));
  MeetingPlace place = options.plane->place();
  place.address = state.address;
  return place;
}

// Returns the options with a plane.
GroupOptions completed(GroupOptions options) {
  if (options.plane == nullptr && options.size > 1) {
    options.plane = elastic::ControlPlane::start({.silence = options.silence});
  }
  return options;
}

// One call of join_group(). Errors of c10d leave it as exceptions, which join_group() converts.
class Joining {
 public:
  explicit Joining(const GroupOptions& options)
      : options_(completed(options)), deadline_(Clock::now() + options.join_timeout) {}
  Expected<std::unique_ptr<Group>> run();

 private:
  Expected<void> open_store();
  Expected<void> claim_rank();
  Expected<void> find_rank_0();
  Expected<void> connect_to_rank_0(const MeetingPlace& place);
  Expected<void> wait_for_all();
  void note_address(const std::string& own, const std::string& met_at);
  void choose_address();
  Expected<void> connect_gloo();
  Expected<void> join();
  Expected<std::string> wait_for(const std::string& key, const std::string& whose);
  std::optional<Error> failure();
  void report(const Error& error);
  [[nodiscard]] int number() const {  // of this rank, for people
    return state_->number_of(transport::Member(options_.rank.value));
  }
  [[nodiscard]] std::string where() const {
    const auto& place = options_.meeting_place;
    return place ? fmt::format("{}:{}", place->address, place->port)
                 : fmt::format("{}:{}", options_.address, options_.port);
  }

  const GroupOptions options_;
  const Clock::time_point deadline_;
  std::shared_ptr<Store> store_;
  c10::intrusive_ptr<::c10d::Store> keys_;  // of this generation
  std::shared_ptr<GroupState> state_;
  // No reachable address of this host is known, so it has the name at which rank 0 was found.
  bool found_by_name_ = false;
};

Expected<void> Joining::open_store() {
  if (store_ != nullptr) return {};
  ::c10d::TCPStoreOptions how;
  how.port = options_.port;
  how.waitWorkers = false;
  how.timeout = options_.join_timeout;
  std::string reached;
  if (options_.rank == WorldRank(0) && options_.store_host == process::StoreHost::kRank0) {
    // Listens here, because c10d would listen on every address and reports failures badly.
    process::UniqueFd listener(options_.store_fd.value_or(-1));
    if (!listener) {
      auto opened = process::listen_on(options_.address, options_.port);
      if (!opened) {
        return make_error(opened.error().code, "{}; MASTER_PORT can be another one",
                          opened.error().message);
      }
      listener = *std::move(opened);
    }
    how.isServer = true;
    reached = process::local_address(listener);
    how.masterListenFd = listener.release();
    how.useLibUV = false;  // which cannot take a socket over
  } else {
    const auto probe = process::connect_to(options_.address, options_.port, deadline_);
    if (!probe) {
      return make_error(probe.error().code,
                        "rank {} found nobody at {} for {:.0f} s: {}; start rank 0 there or "
                        "correct MASTER_ADDR and MASTER_PORT",
                        options_.rank, where(),
                        std::chrono::duration<double>(options_.join_timeout).count(),
                        probe.error().message);
    }
    reached = process::local_address(*probe);
  }
  store_ = std::make_shared<Store>();
  store_->keys = c10::make_intrusive<::c10d::TCPStore>(options_.address, how);
  note_address(reached, options_.address);
  store_->address = state_->address;
  return {};
}

// Notes this rank's address. `own` is its end of the connection to rank 0, which was found at
// `met_at`. A name that is loopback here does not lead other hosts to this one (choose_address).
void Joining::note_address(const std::string& own, const std::string& met_at) {
  found_by_name_ = !process::is_numeric(own) || own == "0.0.0.0" ||
                   (process::is_loopback(own) && !process::is_loopback(met_at));
  state_->address = found_by_name_ ? met_at : own;
}

// Returns the error that another rank has reported, the plane's verdict, or a reason to give up.
std::optional<Error> Joining::failure() {
  if (state_->watch != nullptr) {
    if (auto verdict = state_->watch->verdict()) return verdict;
  }
  if (options_.give_up) {
    if (auto why = options_.give_up()) return why;
  }
  if (keys_ == nullptr || !keys_->check({"error"})) return std::nullopt;
  const std::string text = keys_->get_to_str("error");
  return Error{static_cast<ErrorCode>(std::stoi(text)), text.substr(text.find(' ') + 1)};
}

// Reports an error to the ranks that have joined. Rank 0 waits until they have read it, because the
// store ends with it.
void Joining::report(const Error& error) {
  if (state_->watch != nullptr) state_->watch->announce(error);
  if (keys_ == nullptr) return;
  try {
    const std::string text = fmt::format("{} {}", static_cast<int>(error.code), error.message);
    (void)keys_->compareSet("error", "", text);
    (void)keys_->add("acknowledged", 1);
    if (options_.rank != WorldRank(0)) return;
    const auto until = Clock::now() + kAcknowledgeTime;
    while (Clock::now() < until && keys_->add("acknowledged", 0) < keys_->add("joined", 0)) {
      std::this_thread::sleep_for(kJoinPoll);
    }
  } catch (const std::exception&) {
    return;  // the store has ended, and rank 0 with it
  }
}

Expected<std::string> Joining::wait_for(const std::string& key, const std::string& whose) {
  while (!keys_->check({key})) {
    if (auto error = failure()) return *error;
    if (Clock::now() > deadline_) {
      return make_error(ErrorCode::kPeerLost, "{} did not join at {} within {:.0f} s", whose,
                        where(), std::chrono::duration<double>(options_.join_timeout).count());
    }
    std::this_thread::sleep_for(kJoinPoll);
  }
  return keys_->get_to_str(key);
}

Expected<void> Joining::claim_rank() {
  (void)keys_->add("joined", 1);
  const std::string size = std::to_string(options_.size);
  const std::string agreed = keys_->compareSet("size", "", size);
  if (agreed != size) {
    return make_error(ErrorCode::kBadInput,
                      "rank {} was started for {} ranks, others for {}: give every rank the same "
                      "WORLD_SIZE",
                      options_.rank, size, agreed);
  }
  const std::string me = fmt::format("{:016x}{}", std::random_device()(), getpid());
  if (keys_->compareSet(key_of(options_.rank.value), "", me) != me) {
    return make_error(ErrorCode::kBadInput,
                      "two processes are rank {} at {}: give each its own RANK", options_.rank,
                      where());
  }
  return {};
}

// Finds rank 0 through the store.
Expected<void> Joining::find_rank_0() {
  state_->address = store_->address;
  if (options_.rank == WorldRank(0)) {
    DYNMO_ASSIGN(const MeetingPlace place, listen(options_, *state_));
    keys_->set("plane", fmt::format("{} {} {}", place.secret, place.port, place.address));
    return {};
  }
  DYNMO_ASSIGN(const std::string text, wait_for("plane", "rank 0"));
  MeetingPlace place;
  std::size_t used = 0;
  place.secret = std::stoull(text, &used);
  const std::string rest = text.substr(used + 1);
  place.port = static_cast<std::uint16_t>(std::stoi(rest, &used));
  place.address = rest.substr(used + 1);
  return connect_to_rank_0(place);
}

Expected<void> Joining::connect_to_rank_0(const MeetingPlace& place) {
  const auto left = std::chrono::ceil<milliseconds>(deadline_ - Clock::now());
  DYNMO_ASSIGN(state_->watch, options_.plane->join(watch_options(options_, *state_), place,
                                                   std::min(kConnectTime, left)));
  return {};
}

Expected<void> Joining::wait_for_all() {
  state_->watch->tell(key_of(options_.rank.value),
                      found_by_name_ ? std::string(kUnknown) : state_->address);
  std::vector<int> missing;
  for (int rank = 0; rank < options_.size; ++rank) missing.push_back(rank);
  while (true) {
    std::erase_if(missing, [&](int rank) { return state_->watch->told(key_of(rank)).has_value(); });
    if (missing.empty()) return {};
    if (auto error = failure()) return *error;
    if (Clock::now() > deadline_) break;
    DYNMO_TRY(state_->watch->wait_for({key_of(missing.front())}, kJoinPoll));
  }
  for (int& rank : missing) rank = state_->number_of(transport::Member(rank));
  return make_error(
      ErrorCode::kPeerLost, "{} of {} ranks did not join at {} within {:.0f} s: {}{}",
      missing.size(), options_.size, where(),
      std::chrono::duration<double>(options_.join_timeout).count(),
      fmt::join(missing.begin(), missing.begin() + std::min<std::ptrdiff_t>(8, std::ssize(missing)),
                ", "),
      missing.size() > 8 ? ", ..." : "");
}

// Chooses an address of this host that the other ranks reach, for Gloo. If the master's name gives
// none, it is this host's address on the route to another host's known address. If no rank has one,
// all are on this host, and the name suffices.
void Joining::choose_address() {
  if (!found_by_name_) return;
  for (int rank = 0; rank < options_.size; ++rank) {
    const std::string other = *state_->watch->told(key_of(rank));
    if (other == kUnknown) continue;
    const std::string own = process::address_towards(other);
    if (!own.empty()) {
      state_->address = own;
      if (store_ != nullptr) store_->address = own;
      return;
    }
  }
}

// Connects Gloo on a thread of its own, because its constructor waits for every peer and cannot be
// aborted. If a rank is lost meanwhile, the thread is abandoned.
Expected<void> Joining::connect_gloo() {
  struct Shared {
    std::mutex mutex;
    std::condition_variable finished;
    bool is_finished = false;
    c10::intrusive_ptr<::c10d::Backend> gloo;
    std::exception_ptr exception;
  };
  auto shared = std::make_shared<Shared>();
  auto how = ::c10d::ProcessGroupGloo::Options::create(options_.join_timeout);
  how->devices.push_back(::c10d::ProcessGroupGloo::createDeviceForHostname(state_->address));
  auto relay = c10::make_intrusive<RelayStore>(state_->watch, options_.join_timeout);
  std::thread([shared, how, relay, rank = options_.rank.value, size = options_.size] {
    c10::intrusive_ptr<::c10d::Backend> gloo;
    std::exception_ptr exception;
    try {
      gloo = c10::make_intrusive<::c10d::ProcessGroupGloo>(relay, rank, size, how);
    } catch (...) {
      exception = std::current_exception();
    }
    const std::lock_guard lock(shared->mutex);
    shared->gloo = std::move(gloo);
    shared->exception = exception;
    shared->is_finished = true;
    shared->finished.notify_all();
  }).detach();

  std::unique_lock lock(shared->mutex);
  while (!shared->finished.wait_for(lock, kJoinPoll, [&] { return shared->is_finished; })) {
    if (auto error = failure()) return *error;
    if (Clock::now() > deadline_) {
      return make_error(ErrorCode::kPeerLost,
                        "rank {} could not connect to all others within {:.0f} s", number(),
                        std::chrono::duration<double>(options_.join_timeout).count());
    }
  }
  if (shared->exception) {
    if (auto verdict = state_->watch->verdict_within(state_->verdict_time)) return *verdict;
    std::rethrow_exception(shared->exception);
  }
  state_->gloo = std::move(shared->gloo);
  return {};
}

Expected<void> Joining::join() {
  if (options_.meeting_place) {
    DYNMO_CHECK((options_.rank == WorldRank(0)) == (options_.meeting != nullptr),
                "rank 0 of a meeting listens, and no other rank, got rank {}", options_.rank);
    if (options_.meeting == nullptr) DYNMO_TRY(connect_to_rank_0(*options_.meeting_place));
    if (state_->address.empty()) state_->address = state_->watch->local_address();
    note_address(state_->address, options_.meeting_place->address);
  } else {
    DYNMO_TRY(open_store());
    keys_ = c10::make_intrusive<::c10d::PrefixStore>(
        fmt::format("dynmo/{}/{}", options_.attempt, options_.generation), store_->keys);
    DYNMO_TRY(claim_rank());
    DYNMO_TRY(find_rank_0());
  }
  DYNMO_TRY(wait_for_all());
  choose_address();
  return connect_gloo();
}

Expected<std::unique_ptr<Group>> Joining::run() {
  if (options_.meeting != nullptr) {
    state_ = options_.meeting->state;
  } else {
    state_ = std::make_shared<GroupState>(
        GroupState{transport::Member(options_.rank.value), options_.size, verdict_time(options_)});
    state_->address = options_.own_address;
    state_->numbers = options_.names;
  }
  store_ = options_.store;
  Expected<void> joined;
  if (options_.size > 1) {
    try {
      joined = join();
    } catch (const std::exception& exception) {
      // Only the store and Gloo throw here, and both mean that a rank has ended.
      const auto verdict = state_->watch ? state_->watch->verdict() : std::nullopt;
      joined = verdict.value_or(make_error(ErrorCode::kPeerLost, "rank {} could not join at {}: {}",
                                           number(), where(), first_line_of(exception)));
    }
  }
  if (!joined) {
    report(joined.error());
    return joined.error();
  }
  return make_gloo_group(state_, store_, options_.message_timeout);
}

}  // namespace

GroupOptions group_options(const process::RankEnvironment& environment) {
  GroupOptions options;
  options.rank = environment.rank;
  options.size = environment.size;
  options.address = environment.address;
  options.port = environment.port;
  options.store_host = environment.store_host;
  options.store_fd = environment.store_fd;
  options.attempt = environment.attempt;
  return options;
}

Expected<std::unique_ptr<Group>> join_group(const GroupOptions& options) {
  DYNMO_CHECK(options.size >= 1 && options.rank.value >= 0 && options.rank.value < options.size,
              "a rank of the group, got {} of {}", options.rank, options.size);
  if (options.size > 1) {
    std::signal(SIGPIPE, SIG_IGN);
    // c10d does not log lost peers. Our error names them. There is none if a newcomer leaves while
    // the run continues.
    if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = c10::GLOG_FATAL;
    DYNMO_TRY(
        process::allow_descriptors(process::descriptors_of_rank(options.size + options.beside),
                                   fmt::format("rank {} of {}", options.rank, options.size)));
  }
  return Joining(options).run();
}

Expected<std::shared_ptr<Meeting>> open_meeting(const GroupOptions& options) {
  DYNMO_CHECK(options.rank == WorldRank(0), "rank 0, got {}", options.rank);
  auto meeting = std::make_shared<Meeting>();
  meeting->state = std::make_shared<GroupState>(
      GroupState{transport::Member(0), options.size, verdict_time(options)});
  meeting->state->address = options.own_address.empty() ? options.address : options.own_address;
  meeting->state->numbers = options.names;
  if (options.size == 1) return meeting;  // needs no other rank
  DYNMO_ASSIGN(meeting->place, listen(completed(options), *meeting->state));
  return meeting;
}

const MeetingPlace& place_of(const Meeting& meeting) { return meeting.place; }

void quit(int exit_code) {
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  _exit(exit_code);
}

}  // namespace dynmo::c10d
