// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/elastic/plane_loop_impl.h"
#include "dynmo/process/ending.h"
#include "dynmo/process/signals_blocked.h"

namespace dynmo::elastic {

using process::Frame;
using process::FrameType;
using process::UniqueFd;
using std::chrono::milliseconds;

namespace {

constexpr const char* kThreadName = "dynmo-plane";
constexpr milliseconds kCloseTime{200};
constexpr std::size_t kMaxEnded = 16;    // groups that are remembered
constexpr std::size_t kMaxEarly = 1024;  // frames for one of them
constexpr std::size_t kMaxWaiting = 16;  // joins of a connection, to groups that are not open

}  // namespace

PlaneLoop::PlaneLoop(const PlaneOptions& options)
    : options_(options), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  std::random_device random;
  secret_ = (std::uint64_t{random()} << 32) | random();
  const process::SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), kThreadName);  // for watch()
}

PlaneLoop::~PlaneLoop() {
  request([this] { stop_ = true; });
  thread_.join();
}

void PlaneLoop::wake() {
  const std::uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);  // fails only if it is already readable
}

Expected<void> PlaneLoop::listen(const std::string& address) {
  const std::lock_guard lock(mutex_);
  if (listening_.listener.socket()) return {};
  DYNMO_ASSIGN(UniqueFd socket, process::listen_on(address, 0));
  listening_.listener.listen(std::move(socket));
  listening_.address = address;
  wake();
  return {};
}

PlanePlace PlaneLoop::place() const {
  const std::lock_guard lock(mutex_);
  DYNMO_CHECK(static_cast<bool>(listening_.listener.socket()), "a plane that listens");
  return {.address = listening_.address,
          .port = process::local_port(listening_.listener.socket()),
          .secret = secret_};
}

std::shared_ptr<GroupStar> PlaneLoop::open(const WatchOptions& options) {
  DYNMO_CHECK(options.rank == WorldRank(0) && options.size >= 2,
              "rank 0 of several, got rank {} of {}", options.rank, options.size);
  auto star = std::make_shared<GroupStar>(options);
  request([&] {
    DYNMO_CHECK(static_cast<bool>(listening_.listener.socket()), "a plane that listens");
    stars_.ended.erase(options.generation);
    stars_.open.push_back(star);
    for (PlanePeer& peer : peers_) {
      for (const auto& [channel, early] : std::exchange(peer.waiting, {})) {
        (void)handle_join(peer, channel, early.join);
        for (const auto& [type, text] : early.frames) {
          (void)handle_of_group(peer, type, {channel, text});
        }
      }
    }
  });
  return star;
}

PlanePeer* PlaneLoop::dialled(const std::string& where) {
  const auto found = std::ranges::find_if(
      peers_, [&](const PlanePeer& peer) { return peer.socket && peer.dialled_at == where; });
  return found == peers_.end() ? nullptr : &*found;
}

Expected<std::shared_ptr<GroupStar>> PlaneLoop::join(const WatchOptions& options,
                                                     const PlanePlace& place, milliseconds time,
                                                     std::string& own_address) {
  DYNMO_CHECK(options.rank.value > 0 && options.rank.value < options.size,
              "a rank from 1 to {}, got {}", options.size - 1, options.rank);
  auto star = std::make_shared<GroupStar>(options);
  const std::string where = fmt::format("{}:{}", place.address, place.port);
  UniqueFd socket;
  if (look([&] { return dialled(where) == nullptr; })) {
    auto made = process::connect_to(place.address, place.port, Clock::now() + time);
    if (!made) {
      return star->lost(
          0, fmt::format("no heartbeat connection to {}: {}", where, made.error().message));
    }
    socket = *std::move(made);
    process::make_prompt(socket);
  }
  const auto connected = request([&] {
    secret_ = place.secret;
    PlanePeer* peer = dialled(where);
    if (peer == nullptr && socket) {
      peer = &peers_.emplace_back();
      peer->socket = std::move(socket);
      peer->known = true;
      peer->dialled_at = where;
      peer->out = own_hello();
    }
    if (peer == nullptr) return false;  // has just closed
    const std::uint32_t channel = ++peer->last_channel;
    peer->channels[channel] = star;
    own_address = process::local_address(peer->socket);
    const process::Join join{.generation = options.generation, .rank = options.rank};
    peer->out += process::encode(FrameType::kJoin, {channel, process::text_of(join)});
    peer->flush();
    stars_.open.push_back(star);
    return star->connect(0, *peer, channel);
  });
  if (!connected) return star->lost(0, "its connection closed");
  return star;
}

std::string PlaneLoop::own_hello() const {
  return process::encode(process::Hello{.secret = secret_, .member = options_.id.value});
}

std::string PlaneLoop::hello() const {
  return look([this] { return own_hello(); });
}

void PlaneLoop::watch(const std::vector<Member>& members) {
  for (const Member& member : members) {
    const auto is_same = [&](const WatchedProcess& one) { return one.id == member.id; };
    if (member.id == options_.id || look([&] { return std::ranges::any_of(watched_, is_same); })) {
      continue;
    }
    UniqueFd end = process::end_of_thread(static_cast<pid_t>(member.pid), kThreadName);
    if (!end) continue;
    request([&] { watched_.push_back({.id = member.id, .end = std::move(end)}); });
  }
}

void PlaneLoop::post(const std::string& notice) {
  const std::lock_guard lock(mutex_);
  notice_ = notice;
}

void PlaneLoop::end(GroupStar& star) {
  request([&] {
    star.end();
    if (star.is_rank_0() && !star.all_done()) {
      stars_.ended[star.options().generation] =
          star.verdict().value_or(star.lost(0, "its connection closed"));
      if (stars_.ended.size() > kMaxEnded) stars_.ended.erase(stars_.ended.begin());
    }
    std::erase_if(stars_.open, [&](const auto& one) { return one.get() == &star; });
  });
}

void PlaneLoop::run() {
  Lock lock(mutex_);
  auto next_beat = Clock::now();
  auto last_turn = Clock::now();
  while (!stop_) {
    wait_for_events(lock, next_beat);
    const auto now = Clock::now();
    // This thread may not have run (a paused container, an overloaded host). That time does not
    // count as silence of other ranks, which may have been paused, too. If only this rank was
    // paused, rank 0 reports it.
    if (const auto late = now - last_turn - options_.period; late > options_.period) {
      for (PlanePeer& peer : peers_) peer.last_received += late;
    }
    last_turn = now;
    while (UniqueFd socket = listening_.listener.accept()) {
      peers_.emplace_back().socket = std::move(socket);
    }
    read_peers();
    handle_ended();
    check_silence(now);
    if (now >= next_beat) {
      next_beat = now + options_.period;
      for (PlanePeer& peer : peers_) {
        if (peer.known && peer.out.empty()) peer.out = process::encode(FrameType::kBeat);
      }
    }
    for (PlanePeer& peer : peers_) peer.flush();
    changed_.notify_all();
    tell_verdicts(lock);
  }
  close_connections(lock);
}

void PlaneLoop::wait_for_events(Lock& lock, Clock::time_point until) {
  const auto pause_end = listening_.listener.pause_end();
  const int listener = pause_end ? -1 : listening_.listener.socket().get();
  std::vector<pollfd> events = {{.fd = wake_.get(), .events = POLLIN, .revents = 0},
                                {.fd = listener, .events = POLLIN, .revents = 0}};
  for (const PlanePeer& peer : peers_) {
    const int wanted = POLLIN | (peer.out.empty() ? 0 : POLLOUT);
    events.push_back({.fd = peer.socket.get(), .events = static_cast<short>(wanted), .revents = 0});
  }
  const std::size_t watched = events.size();
  for (const WatchedProcess& process : watched_) {
    events.push_back({.fd = process.end.get(), .events = POLLIN, .revents = 0});
  }
  const auto end = std::min(until, pause_end.value_or(until));
  const auto left = std::chrono::ceil<milliseconds>(end - Clock::now()).count();
  lock.unlock();
  poll(events.data(), events.size(), static_cast<int>(std::max<long>(left, 0)));
  std::uint64_t ignored = 0;
  (void)!read(wake_.get(), &ignored, sizeof ignored);
  lock.lock();
  for (std::size_t place = watched; place < events.size(); ++place) {
    if (events[place].revents != 0) watched_[place - watched].ended = true;
  }
}

void PlaneLoop::read_peers() {
  for (PlanePeer& peer : peers_) {
    if (!peer.socket) continue;
    const State received = peer.receive();
    // Frames that were sent before the connection closed are handled first.
    const State handled = peer.take_frames([&](const Frame& frame) { return handle(peer, frame); });
    if (handled == State::kClosed || received == State::kClosed) handle_closed(peer);
  }
  std::erase_if(peers_, [](const PlanePeer& peer) { return !peer.socket; });
}

PlaneLoop::State PlaneLoop::handle(PlanePeer& peer, const Frame& frame) {
  if (frame.type == FrameType::kHello) return handle_hello(peer, frame.rest);
  if (!peer.known) return State::kClosed;
  if (frame.type == FrameType::kAsk) peer.out += process::encode(FrameType::kNotice, notice_);
  if (frame.type == FrameType::kAsk || frame.type == FrameType::kBeat) return State::kOpen;
  return handle_of_group(peer, frame);
}

PlaneLoop::State PlaneLoop::handle_hello(PlanePeer& peer, std::string_view rest) {
  const auto hello = process::parse_hello(rest);
  if (!hello || hello->secret != secret_ || peer.id != MemberId{}) return State::kClosed;
  peer.id = {hello->member};
  if (!std::exchange(peer.known, true)) {
    peer.out += own_hello();
  }
  return State::kOpen;
}

PlaneLoop::State PlaneLoop::handle_of_group(PlanePeer& peer, const Frame& frame) {
  const auto of_group = process::parse_of_group(frame.rest);
  return of_group ? handle_of_group(peer, frame.type, *of_group) : State::kClosed;
}

PlaneLoop::State PlaneLoop::handle_of_group(PlanePeer& peer, FrameType type,
                                            const process::OfGroup& of_group) {
  if (type == FrameType::kJoin) {
    const auto join = process::parse_join(of_group.rest);
    return join ? handle_join(peer, of_group.channel, *join) : State::kClosed;
  }
  const auto found = peer.channels.find(of_group.channel);
  if (type == FrameType::kGone) {
    peer.waiting.erase(of_group.channel);
    if (found == peer.channels.end()) return State::kOpen;
    const auto star = found->second;
    peer.channels.erase(found);
    star->close(peer);
    return State::kOpen;
  }
  if (const auto early = peer.waiting.find(of_group.channel); early != peer.waiting.end()) {
    early->second.frames.emplace_back(type, of_group.rest);
    return early->second.frames.size() > kMaxEarly ? State::kClosed : State::kOpen;
  }
  if (found == peer.channels.end()) return State::kOpen;  // of a group that has ended
  return found->second->take(peer, type, of_group.rest) ? State::kOpen : State::kClosed;
}

PlaneLoop::State PlaneLoop::handle_join(PlanePeer& peer, std::uint32_t channel,
                                        const process::Join& join) {
  if (peer.channels.contains(channel)) return State::kClosed;
  const auto found = std::ranges::find_if(stars_.open, [&](const auto& star) {
    return star->is_rank_0() && star->options().generation == join.generation;
  });
  if (found != stars_.open.end()) {
    if (!(*found)->connect(join.rank.value, peer, channel)) return State::kClosed;
    peer.channels[channel] = *found;
    return State::kOpen;
  }
  if (const auto why = stars_.ended.find(join.generation); why != stars_.ended.end()) {
    peer.out += process::encode(FrameType::kVerdict, {channel, process::text_of(why->second)});
    return State::kOpen;
  }
  if (peer.waiting.size() >= kMaxWaiting) return State::kClosed;
  peer.waiting[channel] = {.join = join};
  return State::kOpen;
}

void PlaneLoop::handle_closed(PlanePeer& peer) {
  for (const auto& [channel, star] : std::exchange(peer.channels, {})) star->close(peer);
  peer.socket.reset();
  peer.out.clear();
  peer.in.clear();
}

// Handles ended processes. All frames that they have sent were read before.
void PlaneLoop::handle_ended() {
  for (const WatchedProcess& process : watched_) {
    if (!process.ended) continue;
    for (PlanePeer& peer : peers_) {
      if (peer.socket && peer.id == process.id) handle_closed(peer);
    }
  }
  std::erase_if(watched_, [](const WatchedProcess& process) { return process.ended; });
}

void PlaneLoop::check_silence(Clock::time_point now) {
  for (PlanePeer& peer : peers_) {
    if (!peer.socket || now - peer.last_received <= options_.silence) continue;
    if (!peer.known) {
      peer.socket.reset();
      continue;
    }
    const std::string why =
        fmt::format("nothing was heard of it for {:.1f} s",
                    std::chrono::duration<double>(now - peer.last_received).count());
    for (const auto& [channel, star] : peer.channels) star->find_silent(peer, why);
  }
  std::erase_if(peers_, [](const PlanePeer& peer) { return !peer.socket; });
}

void PlaneLoop::tell_verdicts(Lock& lock) {
  std::vector<std::shared_ptr<GroupStar>> news;
  for (const auto& star : stars_.open) {
    if (star->take_news()) news.push_back(star);
  }
  if (news.empty()) return;
  lock.unlock();
  for (const auto& star : news) star->options().on_verdict(*star->verdict());
  lock.lock();
}

// Waits for the other ends to close first. Closing a socket with unread bytes resets the
// connection, and may destroy bytes that the other end has not read yet, such as the verdict.
void PlaneLoop::close_connections(Lock& lock) {
  const auto deadline = Clock::now() + kCloseTime;
  listening_.listener.close();
  watched_.clear();
  std::erase_if(peers_, [](const PlanePeer& peer) { return !peer.known; });
  for (PlanePeer& peer : peers_) {
    peer.flush();
    shutdown(peer.socket.get(), SHUT_WR);
  }
  // Processes that have connected to this plane were told that their group is over.
  std::erase_if(peers_, [](const PlanePeer& peer) { return !peer.dialled_at.empty(); });
  while (Clock::now() < deadline && !peers_.empty()) {
    wait_for_events(lock, deadline);
    for (PlanePeer& peer : peers_) {
      peer.in.clear();
      if (peer.receive() == State::kClosed) peer.socket.reset();
    }
    std::erase_if(peers_, [](const PlanePeer& peer) { return !peer.socket; });
  }
}

}  // namespace dynmo::elastic
