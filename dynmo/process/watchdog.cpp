// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/watchdog.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/process/peer_connection_impl.h"
#include "dynmo/process/sockets.h"
#include "dynmo/process/spawn_impl.h"

namespace dynmo::process {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFlushTime{5000};  // not reached but where a thread gets no time
constexpr milliseconds kCloseTime{200};

using State = PeerConnection::State;

Error lost(int name, const std::string& why) {
  return make_error(ErrorCode::kPeerLost, "rank {} was lost: {}", name, why);
}

int name_of(const WatchdogOptions& options, int rank) {
  return options.names.empty() ? rank : options.names[static_cast<std::size_t>(rank)];
}

}  // namespace

class Watchdog::Loop {
 public:
  Loop(const WatchdogOptions& options, UniqueFd listener, UniqueFd to_rank_0, OnVerdict on_verdict)
      : options_(options),
        on_verdict_(std::move(on_verdict)),
        listener_(std::move(listener)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (to_rank_0) adopt_rank_0(std::move(to_rank_0));
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { run(); });
  }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  ~Loop() {
    request([this] { stop_ = true; });
    thread_.join();
  }

  [[nodiscard]] std::uint16_t port() const { return local_port(listener_); }
  [[nodiscard]] const std::string& own_address() const { return own_address_; }

  std::optional<Error> verdict_within(milliseconds time) const {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, time, [this] { return verdict_.has_value(); });
    return verdict_;
  }
  void announce(const Error& why);
  Expected<void> leave(milliseconds deadline);
  void tell(const std::string& key, const std::string& value);
  std::optional<std::string> told(const std::string& key) const;
  Expected<bool> wait_for(const std::vector<std::string>& keys, milliseconds time) const;

 private:
  [[nodiscard]] int name(int rank) const { return name_of(options_, rank); }
  [[nodiscard]] bool is_rank_0() const { return options_.rank == WorldRank(0); }
  void adopt_rank_0(UniqueFd socket);
  template <typename Change>
  void request(const Change& change);

  void run();
  void wait_for_events(Clock::time_point until);
  void accept_all();
  void read_peers();
  State handle(PeerConnection& peer, const Frame& frame);
  State handle_hello(PeerConnection& peer, std::string_view rest);
  void handle_closed(PeerConnection& peer);
  void take_requests();
  void hear(const PeerConnection& from, Word word);
  void check_all_done();
  void check_silence(Clock::time_point now);
  void decide(const Error& error);
  void broadcast(const std::string& bytes);
  void close_connections();
  [[nodiscard]] bool is_over();

  const WatchdogOptions options_;
  const OnVerdict on_verdict_;
  const UniqueFd listener_;
  const UniqueFd wake_;
  std::string own_address_;            // set before the thread starts
  std::vector<PeerConnection> peers_;  // the thread's own; of a rank that is not 0: rank 0
  bool sent_done_ = false;             // of a rank that is not 0

  mutable std::mutex mutex_;  // guards what follows
  mutable std::condition_variable changed_;
  std::optional<Error> verdict_;
  std::optional<Error> announcement_;
  bool flush_wanted_ = false;
  bool leaving_ = false;
  bool all_done_ = false;
  bool stop_ = false;
  std::map<std::string, std::string> words_;  // all that has been told
  std::vector<Word> to_tell_;

  std::thread thread_;
};

void Watchdog::Loop::adopt_rank_0(UniqueFd socket) {
  make_prompt(socket);
  own_address_ = dynmo::process::local_address(socket);
  PeerConnection& peer = peers_.emplace_back();
  peer.socket = std::move(socket);
  peer.rank = 0;
  peer.out = encode(Hello{.secret = options_.secret, .rank = options_.rank});
  peer.flush();  // sent when connect() returns
}

template <typename Change>
void Watchdog::Loop::request(const Change& change) {
  {
    const std::lock_guard lock(mutex_);
    change();
  }
  const std::uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);  // fails only if it is already readable
}

void Watchdog::Loop::announce(const Error& why) {
  request([&] {
    if (!verdict_ && !all_done_) {
      verdict_ = why;
      announcement_ = why;
      changed_.notify_all();
    }
    flush_wanted_ = true;
  });
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kFlushTime, [this] { return !flush_wanted_; });
}

Expected<void> Watchdog::Loop::leave(milliseconds deadline) {
  request([this] { leaving_ = true; });
  std::unique_lock lock(mutex_);
  const bool resolved =
      changed_.wait_for(lock, deadline, [this] { return all_done_ || verdict_.has_value(); });
  if (all_done_) return {};
  if (resolved) return *verdict_;
  return make_error(ErrorCode::kPeerLost, "rank {} has finished, but other ranks have not for {} s",
                    name(options_.rank.value),
                    std::chrono::duration_cast<std::chrono::seconds>(deadline).count());
}

void Watchdog::Loop::tell(const std::string& key, const std::string& value) {
  request([&] {
    words_[key] = value;
    to_tell_.push_back({key, value});
    changed_.notify_all();
  });
}

std::optional<std::string> Watchdog::Loop::told(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = words_.find(key);
  return found == words_.end() ? std::nullopt : std::optional(found->second);
}

Expected<bool> Watchdog::Loop::wait_for(const std::vector<std::string>& keys,
                                        milliseconds time) const {
  std::unique_lock lock(mutex_);
  const auto all = [&] {
    return std::ranges::all_of(keys, [&](const auto& key) { return words_.contains(key); });
  };
  changed_.wait_for(lock, time, [&] { return verdict_.has_value() || all(); });
  if (verdict_) return *verdict_;
  return all();
}

void Watchdog::Loop::run() {
  auto next_beat = Clock::now();
  auto last_turn = Clock::now();
  while (true) {
    wait_for_events(next_beat);
    const auto now = Clock::now();
    // Time in which this thread did not run (a paused container, a host that is busy beyond
    // measure) is no silence of the others, who may have stood still as well. If this rank stood
    // still alone, rank 0 says so.
    if (const auto late = now - last_turn - options_.period; late > options_.period) {
      for (PeerConnection& peer : peers_) peer.last_received += late;
    }
    last_turn = now;
    if (listener_) accept_all();
    read_peers();
    check_silence(now);
    take_requests();
    if (now >= next_beat) {
      next_beat = now + options_.period;
      for (PeerConnection& peer : peers_) {
        const bool quiet = peer.socket && peer.is_known() && peer.out.empty();
        if (quiet) peer.out = encode(FrameType::kBeat);
      }
    }
    for (PeerConnection& peer : peers_) peer.flush();
    const bool flushed =
        std::ranges::all_of(peers_, [](const PeerConnection& peer) { return peer.out.empty(); });
    const std::lock_guard lock(mutex_);
    if (flush_wanted_ && flushed && !announcement_) {
      flush_wanted_ = false;
      changed_.notify_all();
    }
    if (stop_) break;
  }
  close_connections();
}

void Watchdog::Loop::wait_for_events(Clock::time_point until) {
  std::vector<pollfd> events = {{.fd = wake_.get(), .events = POLLIN, .revents = 0},
                                {.fd = listener_.get(), .events = POLLIN, .revents = 0}};
  for (const PeerConnection& peer : peers_) {
    const int wanted = POLLIN | (peer.out.empty() ? 0 : POLLOUT);
    events.push_back({.fd = peer.socket.get(), .events = static_cast<short>(wanted), .revents = 0});
  }
  const auto left = std::chrono::ceil<milliseconds>(until - Clock::now()).count();
  poll(events.data(), events.size(), static_cast<int>(std::max<long>(left, 0)));
  std::uint64_t ignored = 0;
  (void)!read(wake_.get(), &ignored, sizeof ignored);
}

void Watchdog::Loop::accept_all() {
  while (true) {
    UniqueFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    make_prompt(socket);
    peers_.emplace_back().socket = std::move(socket);
  }
}

void Watchdog::Loop::read_peers() {
  for (PeerConnection& peer : peers_) {
    if (!peer.socket) continue;
    const State received = peer.receive();
    // Frames that were sent before the connection closed count first.
    const State handled = peer.take_frames([&](const Frame& frame) { return handle(peer, frame); });
    if (handled == State::kClosed || received == State::kClosed) handle_closed(peer);
  }
  std::erase_if(peers_,
                [](const PeerConnection& peer) { return !peer.socket && !peer.is_known(); });
}

State Watchdog::Loop::handle(PeerConnection& peer, const Frame& frame) {
  if (frame.type == FrameType::kHello) return handle_hello(peer, frame.rest);
  if (!peer.is_known()) return State::kClosed;
  switch (frame.type) {
    case FrameType::kDone:
      peer.done = true;
      return State::kOpen;
    case FrameType::kAllDone: {
      const std::lock_guard lock(mutex_);
      all_done_ = true;
      changed_.notify_all();
      return State::kOpen;
    }
    case FrameType::kVerdict: {
      const auto verdict = parse_verdict(frame.rest);
      if (!verdict) return State::kClosed;
      decide(*verdict);
      return State::kOpen;
    }
    case FrameType::kWord: {
      auto word = parse_word(frame.rest);
      if (!word) return State::kClosed;
      hear(peer, *std::move(word));
      return State::kOpen;
    }
    case FrameType::kBeat:
    case FrameType::kHello:
      break;
  }
  return State::kOpen;
}

State Watchdog::Loop::handle_hello(PeerConnection& peer, std::string_view rest) {
  const auto hello = parse_hello(rest);
  if (!hello || hello->secret != options_.secret) return State::kClosed;
  const int rank = hello->rank.value;
  const bool known = std::ranges::any_of(
      peers_, [rank](const PeerConnection& other) { return other.rank == rank; });
  if (!is_rank_0() || rank < 1 || rank >= options_.size || known) return State::kClosed;
  peer.rank = rank;
  // One that comes late must hear what was told, and the verdict.
  const std::lock_guard lock(mutex_);
  for (const auto& [key, value] : words_) peer.out += encode(Word{key, value});
  if (verdict_) peer.out += encode_verdict(*verdict_);
  return State::kOpen;
}

// Rank 0 passes it on.
void Watchdog::Loop::hear(const PeerConnection& from, Word word) {
  if (is_rank_0()) {
    for (PeerConnection& peer : peers_) {
      if (&peer == &from || !peer.socket || !peer.is_known()) continue;
      peer.out += encode(word);
    }
  }
  const std::lock_guard lock(mutex_);
  words_[std::move(word.key)] = std::move(word.value);
  changed_.notify_all();
}

void Watchdog::Loop::handle_closed(PeerConnection& peer) {
  peer.socket.reset();
  peer.out.clear();
  peer.in.clear();
  if (peer.is_known() && !peer.done) decide(lost(name(peer.rank), "its connection closed"));
}

void Watchdog::Loop::check_silence(Clock::time_point now) {
  for (PeerConnection& peer : peers_) {
    if (!peer.socket || now - peer.last_received <= options_.silence) continue;
    if (!peer.is_known()) {
      peer.socket.reset();
    } else {
      decide(lost(name(peer.rank),
                  fmt::format("nothing was heard of it for {:.1f} s",
                              std::chrono::duration<double>(now - peer.last_received).count())));
    }
  }
}

void Watchdog::Loop::take_requests() {
  std::optional<Error> announcement;
  std::vector<Word> words;
  bool leaving = false;
  {
    const std::lock_guard lock(mutex_);
    to_tell_.swap(words);
    announcement_.swap(announcement);
    leaving = leaving_ && !verdict_ && !all_done_;
  }
  for (const Word& word : words) broadcast(encode(word));
  if (announcement) {
    // A loss names the rank that is to blame; any other reason is that of this rank.
    if (announcement->code != ErrorCode::kPeerLost) {
      announcement->message =
          fmt::format("rank {}: {}", name(options_.rank.value), announcement->message);
    }
    broadcast(encode_verdict(*announcement));
  }
  if (!leaving) return;
  if (is_rank_0()) {
    check_all_done();
  } else if (!sent_done_) {
    sent_done_ = true;
    broadcast(encode(FrameType::kDone));
  }
}

void Watchdog::Loop::check_all_done() {
  const auto done =
      std::ranges::count_if(peers_, [](const PeerConnection& peer) { return peer.done; });
  if (done != options_.size - 1) return;
  broadcast(encode(FrameType::kAllDone));
  const std::lock_guard lock(mutex_);
  all_done_ = true;
  changed_.notify_all();
}

bool Watchdog::Loop::is_over() {
  const std::lock_guard lock(mutex_);
  return verdict_.has_value() || all_done_;
}

void Watchdog::Loop::decide(const Error& error) {
  {
    const std::lock_guard lock(mutex_);
    if (verdict_ || all_done_) return;
    verdict_ = error;
  }
  // Rank 0 tells the others before it does anything else. Another rank tells rank 0 only what it
  // found of rank 0 itself: if that was merely stopped, it learns so that it is out.
  broadcast(encode_verdict(error));
  changed_.notify_all();
  on_verdict_(error);
}

void Watchdog::Loop::broadcast(const std::string& bytes) {
  for (PeerConnection& peer : peers_) {
    if (!peer.socket || !peer.is_known()) continue;
    peer.out += bytes;
    peer.flush();
  }
}

// A socket that is closed with unread bytes resets the connection and may destroy what the other
// end has not read yet, the verdict among it: so the other ends close first if they can.
void Watchdog::Loop::close_connections() {
  const auto deadline = Clock::now() + kCloseTime;
  const auto is_open = [](const PeerConnection& peer) { return static_cast<bool>(peer.socket); };
  std::erase_if(peers_, [](const PeerConnection& peer) { return !peer.is_known(); });
  for (PeerConnection& peer : peers_) {
    peer.flush();
    if (peer.socket) shutdown(peer.socket.get(), SHUT_WR);
  }
  if (!is_rank_0() || !is_over()) return;
  while (Clock::now() < deadline && std::ranges::any_of(peers_, is_open)) {
    wait_for_events(deadline);
    for (PeerConnection& peer : peers_) {
      peer.in.clear();
      if (peer.socket && peer.receive() == State::kClosed) peer.socket.reset();
    }
  }
}

Watchdog::Watchdog(std::unique_ptr<Loop> loop) : loop_(std::move(loop)) {}
Watchdog::~Watchdog() = default;

Expected<std::unique_ptr<Watchdog>> Watchdog::listen(const WatchdogOptions& options,
                                                     const std::string& address,
                                                     OnVerdict on_verdict) {
  DYNMO_CHECK(options.rank == WorldRank(0) && options.size >= 2,
              "rank 0 of several, got rank {} of {}", options.rank, options.size);
  DYNMO_ASSIGN(UniqueFd listener, listen_on(address, 0));
  make_prompt(listener);
  auto loop =
      std::make_unique<Loop>(options, std::move(listener), UniqueFd(), std::move(on_verdict));
  return std::unique_ptr<Watchdog>(new Watchdog(std::move(loop)));
}

Expected<std::unique_ptr<Watchdog>> Watchdog::connect(const WatchdogOptions& options,
                                                      const std::string& address,
                                                      std::uint16_t port, OnVerdict on_verdict,
                                                      milliseconds time) {
  DYNMO_CHECK(options.rank.value > 0 && options.rank.value < options.size,
              "a rank from 1 to {}, got {}", options.size - 1, options.rank);
  auto socket = connect_to(address, port, Clock::now() + time);
  if (!socket) {
    return make_error(ErrorCode::kPeerLost,
                      "rank {} was lost: no heartbeat connection to {}:{}: {}", name_of(options, 0),
                      address, port, socket.error().message);
  }
  auto loop =
      std::make_unique<Loop>(options, UniqueFd(), std::move(*socket), std::move(on_verdict));
  return std::unique_ptr<Watchdog>(new Watchdog(std::move(loop)));
}

std::uint16_t Watchdog::port() const { return loop_->port(); }
std::string Watchdog::local_address() const { return loop_->own_address(); }
std::optional<Error> Watchdog::verdict() const { return verdict_within(milliseconds(0)); }
std::optional<Error> Watchdog::verdict_within(milliseconds time) const {
  return loop_->verdict_within(time);
}
void Watchdog::tell(const std::string& key, const std::string& value) { loop_->tell(key, value); }
std::optional<std::string> Watchdog::told(const std::string& key) const { return loop_->told(key); }
Expected<bool> Watchdog::wait_for(const std::vector<std::string>& keys, milliseconds time) const {
  return loop_->wait_for(keys, time);
}
void Watchdog::announce(const Error& why) { loop_->announce(why); }
Expected<void> Watchdog::leave(milliseconds deadline) { return loop_->leave(deadline); }

}  // namespace dynmo::process
