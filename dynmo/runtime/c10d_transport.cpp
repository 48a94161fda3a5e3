// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/c10d_transport.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <iostream>
#include <list>
#include <mutex>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/runtime/descriptors.h"
#include "dynmo/runtime/sockets_impl.h"
#include "dynmo/runtime/store_impl.h"
#include "dynmo/runtime/watchdog.h"

namespace dynmo::runtime {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using transport::Operation;
using transport::Tag;

constexpr milliseconds kVerdictTime{4000};  // longer than the watchdog's silence
constexpr milliseconds kJoinPoll{10};
constexpr milliseconds kConnectTime{10000};  // to the watchdog of rank 0, which is there
constexpr const char* kUnknown = "-";        // address
constexpr milliseconds kHearTime{1000};      // for the others to read why joining failed

// The first line of what c10d or Gloo says; they add stack traces and places in their sources.
std::string first_line(const std::exception& exception) {
  const auto* error = dynamic_cast<const c10::Error*>(&exception);
  std::string text = error != nullptr ? error->what_without_backtrace() : exception.what();
  if (text.starts_with('[')) {
    const std::size_t place = text.find("] ");
    if (place != std::string::npos) text.erase(0, place + 2);
  }
  return text.substr(0, text.find('\n'));
}

// The works of one group that are waited for, and why it failed. Any thread may call.
class Outstanding {
 public:
  using Works = std::list<c10::intrusive_ptr<c10d::Work>>;

  // Aborts them all; the first call wins.
  void fail(const Error& why) {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = why;
    for (const auto& work : works_) work->abort();
  }
  [[nodiscard]] std::optional<Error> failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  Works::iterator add(c10::intrusive_ptr<c10d::Work> work) {
    const std::lock_guard lock(mutex_);
    if (failure_) work->abort();  // the group failed since it was posted
    return works_.insert(works_.end(), std::move(work));
  }
  // Under the lock, so that nobody else holds the work after it: with the work goes Gloo's right to
  // touch the bytes.
  void remove(Works::iterator place) {
    const std::lock_guard lock(mutex_);
    works_.erase(place);
  }

 private:
  mutable std::mutex mutex_;
  std::optional<Error> failure_;
  Works works_;
};

// What a group and its operations share. Made by one thread before it is shared, not changed later.
struct State {
  Rank rank;
  int size;
  std::shared_ptr<Outstanding> outstanding = std::make_shared<Outstanding>();  // and the watchdog
  c10::intrusive_ptr<c10d::Backend> gloo = {};
  std::unique_ptr<Watchdog> watchdog = {};  // gone first, with its thread

  [[nodiscard]] std::optional<Error> failure() const { return outstanding->failure(); }
  // Fails the group here and everywhere.
  void abort(const Error& why) const {
    if (watchdog == nullptr) return outstanding->fail(why);
    watchdog->announce(why);
    outstanding->fail(watchdog->verdict().value_or(why));  // an earlier one stays
  }
};

// An error of Gloo on a message to or from `peer`: the group's reason for it. The peer is not
// always the cause: it may have ended because of another.
Error settle(const State& state, Rank peer, const std::string& what) {
  if (auto failure = state.failure()) return *failure;
  if (const auto verdict = state.watchdog->verdict_within(kVerdictTime)) {
    state.outstanding->fail(*verdict);
  } else {
    state.abort(make_error(ErrorCode::kPeerLost, "rank {} was lost: {}", peer, what));
  }
  return *state.failure();
}

class GlooOperation final : public Operation {
 public:
  GlooOperation(std::shared_ptr<State> state, Rank peer, c10::intrusive_ptr<c10d::Work> work)
      : state_(std::move(state)), peer_(peer), place_(state_->outstanding->add(std::move(work))) {}

  ~GlooOperation() override {
    if (waited_) return;
    if (!state_->failure()) {
      state_->abort(make_error(ErrorCode::kInternal,
                               "an operation with rank {} was dropped before it was waited for",
                               peer_));
    }
    state_->outstanding->remove(place_);
  }

  Expected<void> wait() override {
    DYNMO_CHECK(!waited_, "one wait an operation, got a second");
    std::string what = "the transfer was aborted";
    bool arrived = false;
    try {
      arrived = (*place_)->wait();
    } catch (const std::exception& exception) {
      what = first_line(exception);
    }
    waited_ = true;
    state_->outstanding->remove(place_);
    if (!arrived) return settle(*state_, peer_, what);
    if (const auto failure = state_->failure()) return *failure;
    return {};
  }

 private:
  std::shared_ptr<State> state_;
  Rank peer_;
  Outstanding::Works::iterator place_;
  bool waited_ = false;
};

// One that Gloo refused to post, or that came after the failure.
class FailedOperation final : public Operation {
 public:
  FailedOperation(std::shared_ptr<State> state, Rank peer, std::string what)
      : state_(std::move(state)), peer_(peer), what_(std::move(what)) {}
  Expected<void> wait() override { return settle(*state_, peer_, what_); }

 private:
  std::shared_ptr<State> state_;
  Rank peer_;
  std::string what_;
};

class GlooGroup final : public Group {
 public:
  GlooGroup(std::shared_ptr<State> state, std::shared_ptr<Store> store, milliseconds timeout)
      : state_(std::move(state)), store_(std::move(store)), timeout_(timeout) {}
  ~GlooGroup() override {
    if (state_->watchdog == nullptr) return;
    if (!left_ && !state_->failure()) {
      abort(make_error(ErrorCode::kPeerLost, "rank {} has left the group", state_->rank));
    }
  }

  [[nodiscard]] Rank rank() const override { return state_->rank; }
  [[nodiscard]] int size() const override { return state_->size; }

  std::unique_ptr<Operation> send(Rank to, Tag tag, std::span<const std::byte> bytes) override {
    // Gloo takes the bytes of both directions as not const and reads these.
    auto* data = const_cast<std::byte*>(bytes.data());
    return post(to, tag, {data, bytes.size()}, &c10d::Backend::send);
  }
  std::unique_ptr<Operation> receive(Rank from, Tag tag, std::span<std::byte> bytes) override {
    return post(from, tag, bytes, &c10d::Backend::recv);
  }

  void abort(const Error& why) override { state_->abort(why); }
  [[nodiscard]] std::optional<Error> failure() const override { return state_->failure(); }
  Expected<void> leave() override;
  [[nodiscard]] std::shared_ptr<Store> store() const override { return store_; }

 private:
  using Post = c10::intrusive_ptr<c10d::Work> (c10d::Backend::*)(std::vector<at::Tensor>&, int,
                                                                 int);
  std::unique_ptr<Operation> post(Rank peer, Tag tag, std::span<std::byte> bytes, Post how);

  std::shared_ptr<State> state_;
  std::shared_ptr<Store> store_;
  milliseconds timeout_;
  bool left_ = false;
};

std::unique_ptr<Operation> GlooGroup::post(Rank peer, Tag tag, std::span<std::byte> bytes,
                                           Post how) {
  DYNMO_CHECK(peer != rank() && peer.value >= 0 && peer.value < size(),
              "a peer of rank {} in a group of {}, got {}", rank(), size(), peer);
  DYNMO_CHECK(tag >= 0, "a tag of at least 0, got {}", tag);
  DYNMO_CHECK(!bytes.empty(), "a message of at least one byte");
  if (state_->failure()) return std::make_unique<FailedOperation>(state_, peer, "");
  std::vector<at::Tensor> tensors = {
      at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte)};
  try {
    auto work = ((*state_->gloo).*how)(tensors, peer.value, tag);
    return std::make_unique<GlooOperation>(state_, peer, std::move(work));
  } catch (const std::exception& exception) {
    return std::make_unique<FailedOperation>(state_, peer, first_line(exception));
  }
}

Expected<void> GlooGroup::leave() {
  DYNMO_CHECK(!left_, "a group is left once");
  if (const auto failure = state_->failure()) return *failure;
  if (state_->watchdog != nullptr) {
    const auto done = state_->watchdog->leave(timeout_);
    if (!done) {
      abort(done.error());
      return *state_->failure();
    }
  }
  left_ = true;
  return {};
}

// Joining, one object a call. Errors of c10d leave it as exceptions; join_group turns them.
class Joining {
 public:
  explicit Joining(const GroupOptions& options)
      : options_(options), deadline_(Clock::now() + options.join_timeout) {}
  Expected<std::unique_ptr<Group>> run();

 private:
  Expected<void> open_store();
  Expected<void> claim_rank();
  Expected<void> start_watchdog();
  Expected<void> wait_for_all();
  void choose_address();
  Expected<void> connect_gloo();
  Expected<void> meet();
  Expected<std::string> wait_for(const std::string& key, const std::string& whose);
  std::optional<Error> trouble();
  void report(const Error& error);
  [[nodiscard]] std::string where() const {
    return fmt::format("{}:{}", options_.address, options_.port);
  }
  [[nodiscard]] std::string rank_key(int rank) const { return fmt::format("rank/{}", rank); }

  const GroupOptions options_;
  const Clock::time_point deadline_;
  std::shared_ptr<Store> store_;
  c10::intrusive_ptr<c10d::Store> keys_;  // of this generation
  std::shared_ptr<State> state_;
  bool found_by_name_ = false;  // no address of this host is known by which others reach it
};

Expected<void> Joining::open_store() {
  if (store_ != nullptr) return {};
  c10d::TCPStoreOptions how;
  how.port = options_.port;
  how.waitWorkers = false;
  how.timeout = options_.join_timeout;
  std::string reached;
  if (options_.rank == Rank(0) && options_.store_host == StoreHost::kRank0) {
    // Listening is not left to c10d: it would listen on every address, and cannot say well why not.
    UniqueFd listener(options_.store_fd.value_or(-1));
    if (!listener) {
      DYNMO_ASSIGN(listener, listen_on(options_.address, options_.port));
    }
    how.isServer = true;
    reached = local_address(listener);
    how.masterListenFd = listener.release();
    how.useLibUV = false;  // which cannot take a socket over
  } else {
    const auto probe = connect_to(options_.address, options_.port, deadline_);
    if (!probe) {
      return make_error(probe.error().code,
                        "rank {} found nobody at {} for {:.0f} s: {}; start rank 0 there or "
                        "correct MASTER_ADDR and MASTER_PORT",
                        options_.rank, where(),
                        std::chrono::duration<double>(options_.join_timeout).count(),
                        probe.error().message);
    }
    reached = local_address(*probe);
  }
  store_ = std::make_shared<Store>();
  store_->keys = c10::make_intrusive<c10d::TCPStore>(options_.address, how);
  // A name that is loopback here is not where other hosts find this one; see choose_address.
  found_by_name_ = reached == "0.0.0.0" || (is_loopback(reached) && !is_loopback(options_.address));
  store_->address = found_by_name_ ? options_.address : reached;
  return {};
}

// The error that another rank has reported, or the watchdog's.
std::optional<Error> Joining::trouble() {
  if (state_->watchdog != nullptr) {
    if (auto verdict = state_->watchdog->verdict()) return verdict;
  }
  if (!keys_->check({"error"})) return std::nullopt;
  const std::string text = keys_->get_to_str("error");
  return Error{static_cast<ErrorCode>(std::stoi(text)), text.substr(text.find(' ') + 1)};
}

// Tells the ranks that are there already; rank 0, with whom the store goes, waits until they know.
void Joining::report(const Error& error) {
  if (state_->watchdog != nullptr) state_->watchdog->announce(error);
  if (keys_ == nullptr) return;
  try {
    const std::string text = fmt::format("{} {}", static_cast<int>(error.code), error.message);
    (void)keys_->compareSet("error", "", text);
    (void)keys_->add("heard", 1);
    if (options_.rank != Rank(0)) return;
    const auto until = Clock::now() + kHearTime;
    while (Clock::now() < until && keys_->add("heard", 0) < keys_->add("came", 0)) {
      std::this_thread::sleep_for(kJoinPoll);
    }
  } catch (const std::exception&) {
    return;  // the store is gone: then so is rank 0
  }
}

Expected<std::string> Joining::wait_for(const std::string& key, const std::string& whose) {
  while (!keys_->check({key})) {
    if (auto error = trouble()) return *error;
    if (Clock::now() > deadline_) {
      return make_error(ErrorCode::kPeerLost, "{} did not join at {} within {:.0f} s", whose,
                        where(), std::chrono::duration<double>(options_.join_timeout).count());
    }
    std::this_thread::sleep_for(kJoinPoll);
  }
  return keys_->get_to_str(key);
}

Expected<void> Joining::claim_rank() {
  (void)keys_->add("came", 1);
  const std::string size = std::to_string(options_.size);
  const std::string agreed = keys_->compareSet("size", "", size);
  if (agreed != size) {
    return make_error(ErrorCode::kBadInput,
                      "rank {} was started for {} ranks, others for {}: give every rank the same "
                      "WORLD_SIZE",
                      options_.rank, size, agreed);
  }
  const std::string me = fmt::format("{:016x}{}", std::random_device()(), getpid());
  if (keys_->compareSet(rank_key(options_.rank.value), "", me) != me) {
    return make_error(ErrorCode::kBadInput,
                      "two processes are rank {} at {}: give each its own RANK", options_.rank,
                      where());
  }
  return {};
}

Expected<void> Joining::start_watchdog() {
  WatchdogOptions how{.rank = options_.rank, .size = options_.size, .silence = options_.silence};
  // Not the state: its destructor must not run on the watchdog's own thread.
  const auto on_verdict = [outstanding = state_->outstanding](const Error& why) {
    outstanding->fail(why);
  };
  if (options_.rank == Rank(0)) {
    std::random_device random;
    how.secret = (std::uint64_t{random()} << 32) | random();
    DYNMO_ASSIGN(state_->watchdog, Watchdog::listen(how, store_->address, on_verdict));
    keys_->set("watchdog",
               fmt::format("{} {} {}", how.secret, state_->watchdog->port(), store_->address));
    return {};
  }
  DYNMO_ASSIGN(const std::string text, wait_for("watchdog", "rank 0"));
  std::size_t used = 0;
  how.secret = std::stoull(text, &used);
  const std::string rest = text.substr(used + 1);
  const auto port = static_cast<std::uint16_t>(std::stoi(rest, &used));
  DYNMO_ASSIGN(state_->watchdog,
               Watchdog::connect(how, rest.substr(used + 1), port, on_verdict, kConnectTime));
  return {};
}

Expected<void> Joining::wait_for_all() {
  keys_->set("ready/" + rank_key(options_.rank.value),
             found_by_name_ ? std::string(kUnknown) : store_->address);
  std::vector<int> missing;
  for (int rank = 0; rank < options_.size; ++rank) missing.push_back(rank);
  while (true) {
    std::erase_if(missing, [&](int rank) { return keys_->check({"ready/" + rank_key(rank)}); });
    if (missing.empty()) return {};
    if (auto error = trouble()) return *error;
    if (Clock::now() > deadline_) break;
    std::this_thread::sleep_for(kJoinPoll);
  }
  return make_error(
      ErrorCode::kPeerLost, "{} of {} ranks did not join at {} within {:.0f} s: {}{}",
      missing.size(), options_.size, where(),
      std::chrono::duration<double>(options_.join_timeout).count(),
      fmt::join(missing.begin(), missing.begin() + std::min<std::ptrdiff_t>(8, std::ssize(missing)),
                ", "),
      missing.size() > 8 ? ", ..." : "");
}

// Gloo needs an address of this host that the others reach. Where its own view of the master's name
// is none, a rank on another host has one of that host: the way there is the way from there. If no
// rank has one, all are on this host, where the name will do.
void Joining::choose_address() {
  if (!found_by_name_) return;
  for (int rank = 0; rank < options_.size; ++rank) {
    const std::string other = keys_->get_to_str("ready/" + rank_key(rank));
    if (other == kUnknown) continue;
    const std::string own = address_towards(other);
    if (!own.empty()) {
      store_->address = own;
      return;
    }
  }
}

// Gloo's constructor waits for every peer and knows no abort: on a thread of its own, which is left
// behind should a rank be lost just then.
Expected<void> Joining::connect_gloo() {
  struct Shared {
    std::mutex mutex;
    std::condition_variable finished;
    bool is_finished = false;
    c10::intrusive_ptr<c10d::Backend> gloo;
    std::exception_ptr exception;
  };
  auto shared = std::make_shared<Shared>();
  auto how = c10d::ProcessGroupGloo::Options::create(options_.join_timeout);
  how->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(store_->address));
  auto prefix = c10::make_intrusive<c10d::PrefixStore>("gloo", keys_);
  std::thread([shared, how, prefix, rank = options_.rank.value, size = options_.size] {
    c10::intrusive_ptr<c10d::Backend> gloo;
    std::exception_ptr exception;
    try {
      gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(prefix, rank, size, how);
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
    if (auto verdict = state_->watchdog->verdict()) return *verdict;
    if (Clock::now() > deadline_) {
      return make_error(ErrorCode::kPeerLost,
                        "rank {} could not connect to all others within {:.0f} s", options_.rank,
                        std::chrono::duration<double>(options_.join_timeout).count());
    }
  }
  if (shared->exception) {
    if (auto verdict = state_->watchdog->verdict_within(kVerdictTime)) return *verdict;
    std::rethrow_exception(shared->exception);
  }
  state_->gloo = std::move(shared->gloo);
  state_->gloo->setTimeout(options_.message_timeout);
  return {};
}

Expected<void> Joining::meet() {
  DYNMO_TRY(open_store());
  keys_ = c10::make_intrusive<c10d::PrefixStore>(
      fmt::format("dynmo/{}/{}", options_.attempt, options_.generation), store_->keys);
  DYNMO_TRY(claim_rank());
  DYNMO_TRY(start_watchdog());
  DYNMO_TRY(wait_for_all());
  choose_address();
  return connect_gloo();
}

Expected<std::unique_ptr<Group>> Joining::run() {
  state_ = std::make_shared<State>(State{options_.rank, options_.size});
  store_ = options_.store;
  Expected<void> joined;
  if (options_.size > 1) {
    try {
      joined = meet();
    } catch (const std::exception& exception) {
      // Only the store and Gloo throw here, and both mean that somebody has gone.
      const auto verdict = state_->watchdog ? state_->watchdog->verdict() : std::nullopt;
      joined = verdict.value_or(make_error(ErrorCode::kPeerLost, "rank {} could not join at {}: {}",
                                           options_.rank, where(), first_line(exception)));
    }
  }
  if (!joined) {
    report(joined.error());
    return joined.error();
  }
  return std::unique_ptr<Group>(
      std::make_unique<GlooGroup>(state_, store_, options_.message_timeout));
}

}  // namespace

GroupOptions group_options(const RankEnvironment& environment) {
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
    DYNMO_TRY(allow_descriptors(descriptors_of_rank(options.size),
                                fmt::format("rank {} of {}", options.rank, options.size)));
  }
  return Joining(options).run();
}

void quit(int exit_code) {
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  _exit(exit_code);
}

}  // namespace dynmo::runtime
