// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/watchdog.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/runtime/sockets_impl.h"

namespace dynmo::runtime {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFlushTime{500};
constexpr milliseconds kCloseTime{200};
constexpr std::size_t kLongestText = 4000;
constexpr std::size_t kLongestFrame = 8192;

// On the wire: length of the rest (4 bytes), type (1), what follows depends on the type. Numbers as
// the machine has them; the ranks of a group are of one kind.
enum class Frame : char {
  kHello,    // to rank 0: secret (8), rank (4)
  kBeat,     // nothing
  kDone,     // to rank 0: nothing
  kAllDone,  // from rank 0: nothing
  kVerdict,  // code (4), text
};

template <typename T>
void append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <typename T>
T take(std::string_view& bytes) {
  T value{};
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes.remove_prefix(sizeof value);
  return value;
}

std::string frame(Frame type, std::string_view rest = {}) {
  std::string bytes;
  append(bytes, static_cast<std::uint32_t>(rest.size() + 1));
  append(bytes, type);
  bytes.append(rest);
  return bytes;
}

std::string verdict_frame(const Error& error) {
  std::string rest;
  append(rest, static_cast<std::int32_t>(error.code));
  rest.append(error.message, 0, kLongestText);
  return frame(Frame::kVerdict, rest);
}

Error lost(int rank, const std::string& why) {
  return make_error(ErrorCode::kPeerLost, "rank {} was lost: {}", rank, why);
}

// One connection. Belongs to the thread.
struct Peer {
  UniqueFd socket;
  int rank = -1;  // unknown before its hello
  std::string in;
  std::string out;
  Clock::time_point heard = Clock::now();
  bool done = false;  // has finished its work: its end is no loss
};

// Sends what fits without blocking. What fails to be sent shows as a closed connection when read.
void flush(Peer& peer) {
  while (peer.socket && !peer.out.empty()) {
    const ssize_t sent = send(peer.socket.get(), peer.out.data(), peer.out.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN) peer.out.clear();
    if (sent <= 0) return;
    peer.out.erase(0, static_cast<std::size_t>(sent));
  }
}

enum class Reading { kOpen, kClosed };

Reading read_all(Peer& peer) {
  std::array<char, 4096> bytes;
  while (true) {
    const ssize_t got = recv(peer.socket.get(), bytes.data(), bytes.size(), 0);
    if (got > 0) {
      peer.in.append(bytes.data(), static_cast<std::size_t>(got));
      peer.heard = Clock::now();
      if (peer.in.size() > 2 * kLongestFrame) return Reading::kOpen;  // the rest next time
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    return got < 0 && errno == EAGAIN ? Reading::kOpen : Reading::kClosed;
  }
}

// Signals are for the thread that the program expects them in, not for this one.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

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

  std::optional<Error> verdict_within(milliseconds time) const {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, time, [this] { return verdict_.has_value(); });
    return verdict_;
  }
  void announce(const Error& why);
  Expected<void> leave(milliseconds deadline);

 private:
  [[nodiscard]] bool is_rank_0() const { return options_.rank == Rank(0); }
  void adopt_rank_0(UniqueFd socket);
  template <typename Change>
  void request(const Change& change);

  void run();
  void wait_for_events(Clock::time_point until);
  void accept_all();
  void read_peers();
  Reading handle_frames(Peer& peer);
  Reading handle(Peer& peer, Frame type, std::string_view rest);
  Reading handle_hello(Peer& peer, std::string_view rest);
  void handle_closed(Peer& peer);
  void take_requests();
  void check_all_done();
  void check_silence(Clock::time_point now);
  void decide(const Error& error);
  void say(const std::string& bytes);
  void say_goodbye();
  [[nodiscard]] bool is_over();

  const WatchdogOptions options_;
  const OnVerdict on_verdict_;
  const UniqueFd listener_;
  const UniqueFd wake_;
  std::vector<Peer> peers_;  // the thread's own; of a rank that is not 0: rank 0
  bool said_done_ = false;   // likewise

  mutable std::mutex mutex_;  // guards what follows
  mutable std::condition_variable changed_;
  std::optional<Error> verdict_;
  std::optional<Error> announcement_;
  bool flush_wanted_ = false;
  bool leaving_ = false;
  bool all_done_ = false;
  bool stop_ = false;

  std::thread thread_;
};

void Watchdog::Loop::adopt_rank_0(UniqueFd socket) {
  make_prompt(socket);
  Peer& peer = peers_.emplace_back();
  peer.socket = std::move(socket);
  peer.rank = 0;
  std::string rest;
  append(rest, options_.secret);
  append(rest, options_.rank.value);
  peer.out = frame(Frame::kHello, rest);
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
  const bool settled =
      changed_.wait_for(lock, deadline, [this] { return all_done_ || verdict_.has_value(); });
  if (all_done_) return {};
  if (settled) return *verdict_;
  return make_error(ErrorCode::kPeerLost, "rank {} has finished, but other ranks have not for {} s",
                    options_.rank,
                    std::chrono::duration_cast<std::chrono::seconds>(deadline).count());
}

void Watchdog::Loop::run() {
  auto next_beat = Clock::now();
  auto last_turn = Clock::now();
  while (true) {
    wait_for_events(next_beat);
    const auto now = Clock::now();
    // This process itself was stopped for a while, perhaps with all others (a paused container):
    // whoever was silent then has a new chance. If it was this one alone, rank 0 says so.
    if (now - last_turn > options_.silence / 2) {
      for (Peer& peer : peers_) peer.heard = now;
    }
    last_turn = now;
    if (listener_) accept_all();
    read_peers();
    check_silence(now);
    take_requests();
    if (now >= next_beat) {
      next_beat = now + options_.period;
      for (Peer& peer : peers_) {
        if (peer.socket && peer.rank >= 0 && peer.out.empty()) peer.out = frame(Frame::kBeat);
      }
    }
    for (Peer& peer : peers_) flush(peer);
    const bool flushed =
        std::ranges::all_of(peers_, [](const Peer& peer) { return peer.out.empty(); });
    const std::lock_guard lock(mutex_);
    if (flush_wanted_ && flushed && !announcement_) {
      flush_wanted_ = false;
      changed_.notify_all();
    }
    if (stop_) break;
  }
  say_goodbye();
}

void Watchdog::Loop::wait_for_events(Clock::time_point until) {
  std::vector<pollfd> events = {{.fd = wake_.get(), .events = POLLIN, .revents = 0},
                                {.fd = listener_.get(), .events = POLLIN, .revents = 0}};
  for (const Peer& peer : peers_) {
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
  for (Peer& peer : peers_) {
    if (!peer.socket) continue;
    const Reading reading = read_all(peer);
    // What was said before the connection closed counts first.
    if (handle_frames(peer) == Reading::kClosed || reading == Reading::kClosed) handle_closed(peer);
  }
  std::erase_if(peers_, [](const Peer& peer) { return !peer.socket && peer.rank < 0; });
}

Reading Watchdog::Loop::handle_frames(Peer& peer) {
  while (peer.in.size() >= sizeof(std::uint32_t)) {
    std::string_view bytes = peer.in;
    const auto length = take<std::uint32_t>(bytes);
    if (length == 0 || length > kLongestFrame) return Reading::kClosed;
    if (bytes.size() < length) break;
    std::string_view rest = bytes.substr(0, length);
    const auto type = take<Frame>(rest);
    if (handle(peer, type, rest) == Reading::kClosed) return Reading::kClosed;
    peer.in.erase(0, sizeof(std::uint32_t) + length);
  }
  return Reading::kOpen;
}

Reading Watchdog::Loop::handle(Peer& peer, Frame type, std::string_view rest) {
  if (type == Frame::kHello) return handle_hello(peer, rest);
  if (peer.rank < 0) return Reading::kClosed;
  switch (type) {
    case Frame::kDone:
      peer.done = true;
      return Reading::kOpen;
    case Frame::kAllDone: {
      const std::lock_guard lock(mutex_);
      all_done_ = true;
      changed_.notify_all();
      return Reading::kOpen;
    }
    case Frame::kVerdict: {
      if (rest.size() < sizeof(std::int32_t)) return Reading::kClosed;
      const auto code = take<std::int32_t>(rest);
      decide(Error{static_cast<ErrorCode>(code), std::string(rest)});
      return Reading::kOpen;
    }
    case Frame::kBeat:
    case Frame::kHello:
      break;
  }
  return Reading::kOpen;
}

Reading Watchdog::Loop::handle_hello(Peer& peer, std::string_view rest) {
  if (rest.size() != sizeof(std::uint64_t) + sizeof(std::int32_t)) return Reading::kClosed;
  if (take<std::uint64_t>(rest) != options_.secret) return Reading::kClosed;
  const auto rank = take<std::int32_t>(rest);
  const bool known =
      std::ranges::any_of(peers_, [rank](const Peer& other) { return other.rank == rank; });
  if (!is_rank_0() || rank < 1 || rank >= options_.size || known) return Reading::kClosed;
  peer.rank = rank;
  // One that comes after the verdict must hear it too.
  const std::lock_guard lock(mutex_);
  if (verdict_) peer.out += verdict_frame(*verdict_);
  return Reading::kOpen;
}

void Watchdog::Loop::handle_closed(Peer& peer) {
  peer.socket.reset();
  peer.out.clear();
  peer.in.clear();
  if (peer.rank >= 0 && !peer.done) decide(lost(peer.rank, "its connection closed"));
}

void Watchdog::Loop::check_silence(Clock::time_point now) {
  for (Peer& peer : peers_) {
    if (!peer.socket || now - peer.heard <= options_.silence) continue;
    if (peer.rank < 0) {
      peer.socket.reset();
    } else {
      decide(lost(peer.rank, fmt::format("nothing was heard of it for {:.1f} s",
                                         std::chrono::duration<double>(now - peer.heard).count())));
    }
  }
}

void Watchdog::Loop::take_requests() {
  std::optional<Error> announcement;
  bool leaving = false;
  {
    const std::lock_guard lock(mutex_);
    announcement_.swap(announcement);
    leaving = leaving_ && !verdict_ && !all_done_;
  }
  if (announcement) {
    // A loss names the rank that is to blame; any other reason is that of this rank.
    if (announcement->code != ErrorCode::kPeerLost) {
      announcement->message = fmt::format("rank {}: {}", options_.rank, announcement->message);
    }
    say(verdict_frame(*announcement));
  }
  if (!leaving) return;
  if (is_rank_0()) {
    check_all_done();
  } else if (!said_done_) {
    said_done_ = true;
    say(frame(Frame::kDone));
  }
}

void Watchdog::Loop::check_all_done() {
  const auto done = std::ranges::count_if(peers_, [](const Peer& peer) { return peer.done; });
  if (done != options_.size - 1) return;
  say(frame(Frame::kAllDone));
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
  say(verdict_frame(error));
  changed_.notify_all();
  on_verdict_(error);
}

void Watchdog::Loop::say(const std::string& bytes) {
  for (Peer& peer : peers_) {
    if (!peer.socket || peer.rank < 0) continue;
    peer.out += bytes;
    flush(peer);
  }
}

// A socket that is closed with unread bytes resets the connection and may destroy what the other
// end has not read yet, the verdict among it: so the other ends close first if they can.
void Watchdog::Loop::say_goodbye() {
  const auto deadline = Clock::now() + kCloseTime;
  const auto is_open = [](const Peer& peer) { return static_cast<bool>(peer.socket); };
  std::erase_if(peers_, [](const Peer& peer) { return peer.rank < 0; });
  for (Peer& peer : peers_) {
    flush(peer);
    if (peer.socket) shutdown(peer.socket.get(), SHUT_WR);
  }
  if (!is_rank_0() || !is_over()) return;
  while (Clock::now() < deadline && std::ranges::any_of(peers_, is_open)) {
    wait_for_events(deadline);
    for (Peer& peer : peers_) {
      peer.in.clear();
      if (peer.socket && read_all(peer) == Reading::kClosed) peer.socket.reset();
    }
  }
}

Watchdog::Watchdog(std::unique_ptr<Loop> loop) : loop_(std::move(loop)) {}
Watchdog::~Watchdog() = default;

Expected<std::unique_ptr<Watchdog>> Watchdog::listen(const WatchdogOptions& options,
                                                     const std::string& address,
                                                     OnVerdict on_verdict) {
  DYNMO_CHECK(options.rank == Rank(0) && options.size >= 2, "rank 0 of several, got rank {} of {}",
              options.rank, options.size);
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
    return make_error(ErrorCode::kPeerLost, "rank 0 was lost: no heartbeat connection to {}:{}: {}",
                      address, port, socket.error().message);
  }
  auto loop =
      std::make_unique<Loop>(options, UniqueFd(), std::move(*socket), std::move(on_verdict));
  return std::unique_ptr<Watchdog>(new Watchdog(std::move(loop)));
}

std::uint16_t Watchdog::port() const { return loop_->port(); }
std::optional<Error> Watchdog::verdict() const { return verdict_within(milliseconds(0)); }
std::optional<Error> Watchdog::verdict_within(milliseconds time) const {
  return loop_->verdict_within(time);
}
void Watchdog::announce(const Error& why) { loop_->announce(why); }
Expected<void> Watchdog::leave(milliseconds deadline) { return loop_->leave(deadline); }

}  // namespace dynmo::runtime
