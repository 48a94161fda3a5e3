// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/control_plane.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "dynmo/elastic/plane_loop_impl.h"

namespace dynmo::elastic {
namespace {

using process::FrameType;
using State = process::PeerConnection::State;
using std::chrono::milliseconds;

constexpr milliseconds kFlushTime{5000};  // reached only if a thread gets no time

}  // namespace

GroupWatch::GroupWatch(std::unique_ptr<Ends> ends) : ends_(std::move(ends)) {}
GroupWatch::~GroupWatch() { ends_->loop->end(*ends_->star); }

std::optional<Error> GroupWatch::verdict() const {
  return ends_->loop->look([this] { return ends_->star->verdict(); });
}

std::optional<Error> GroupWatch::verdict_within(milliseconds time) const {
  (void)ends_->loop->wait_until(time, [this] { return ends_->star->verdict().has_value(); });
  return verdict();
}

void GroupWatch::tell(const std::string& key, const std::string& value) {
  ends_->loop->request([&] { ends_->star->tell({key, value}); });
}

std::optional<std::string> GroupWatch::told(const std::string& key) const {
  return ends_->loop->look([&] {
    const auto found = ends_->star->words().find(key);
    return found == ends_->star->words().end() ? std::nullopt : std::optional(found->second);
  });
}

Expected<bool> GroupWatch::wait_for(const std::vector<std::string>& keys, milliseconds time) const {
  const GroupStar& star = *ends_->star;
  const auto all = [&] {
    return std::ranges::all_of(keys, [&](const auto& key) { return star.words().contains(key); });
  };
  (void)ends_->loop->wait_until(time, [&] { return star.verdict().has_value() || all(); });
  return ends_->loop->look([&]() -> Expected<bool> {
    if (star.verdict()) return *star.verdict();
    return all();
  });
}

void GroupWatch::announce(const Error& why) {
  ends_->loop->request([&] { ends_->star->announce(why); });
  (void)ends_->loop->wait_until(kFlushTime, [this] { return ends_->star->is_flushed(); });
}

Expected<void> GroupWatch::leave(milliseconds deadline) {
  const GroupStar& star = *ends_->star;
  ends_->loop->request([&] { ends_->star->leave(); });
  (void)ends_->loop->wait_until(deadline, [&] { return star.is_over(); });
  return ends_->loop->look([&]() -> Expected<void> {
    if (star.all_done()) return {};
    if (star.verdict()) return *star.verdict();
    const int rank = star.options().rank.value;
    const auto& names = star.options().names;
    return make_error(ErrorCode::kPeerLost,
                      "rank {} has finished, but other ranks have not for {} s",
                      names.empty() ? rank : names[static_cast<std::size_t>(rank)],
                      std::chrono::duration_cast<std::chrono::seconds>(deadline).count());
  });
}

std::string GroupWatch::local_address() const { return ends_->own_address; }

ControlPlane::ControlPlane(std::shared_ptr<PlaneLoop> loop) : loop_(std::move(loop)) {}
ControlPlane::~ControlPlane() = default;

std::shared_ptr<ControlPlane> ControlPlane::start(const PlaneOptions& options) {
  return std::shared_ptr<ControlPlane>(new ControlPlane(std::make_shared<PlaneLoop>(options)));
}

Expected<void> ControlPlane::listen(const std::string& address) { return loop_->listen(address); }
PlanePlace ControlPlane::place() const { return loop_->place(); }

std::unique_ptr<GroupWatch> ControlPlane::open(const WatchOptions& options) {
  auto star = loop_->open(options);
  return std::unique_ptr<GroupWatch>(
      new GroupWatch(std::make_unique<GroupWatch::Ends>(loop_, std::move(star))));
}

Expected<std::unique_ptr<GroupWatch>> ControlPlane::join(const WatchOptions& options,
                                                         const PlanePlace& place,
                                                         milliseconds time) {
  auto ends = std::make_unique<GroupWatch::Ends>();
  ends->loop = loop_;
  DYNMO_ASSIGN(ends->star, loop_->join(options, place, time, ends->own_address));
  return std::unique_ptr<GroupWatch>(new GroupWatch(std::move(ends)));
}

void ControlPlane::watch(const std::vector<Member>& members) { loop_->watch(members); }

void ControlPlane::post(const std::string& notice) { loop_->post(notice); }

std::optional<std::string> ControlPlane::take_failure() const { return loop_->take_failure(); }

Answer ControlPlane::ask(const PlanePlace& place, MemberId member, milliseconds time) const {
  const auto deadline = std::chrono::steady_clock::now() + time;
  process::Dialled dialled = process::dial(place.address, place.port, deadline);
  if (dialled.refused) return {.fate = Fate::kDead};
  if (!dialled.socket) return {};
  process::PeerConnection peer;
  peer.socket = std::move(dialled.socket);
  peer.known = true;
  process::make_prompt(peer.socket);
  peer.out = loop_->hello() + process::encode(FrameType::kAsk);
  Answer answer;
  const auto take = [&](const process::Frame& frame) {
    if (frame.type == FrameType::kHello) {
      const auto hello = process::parse_hello(frame.rest);
      if (!hello) return State::kClosed;
      answer.fate = hello->member == member.value ? Fate::kAlive : Fate::kDead;
      return answer.fate == Fate::kAlive ? State::kOpen : State::kClosed;
    }
    if (frame.type != FrameType::kNotice) return State::kOpen;
    answer.notice = frame.rest;
    return State::kClosed;
  };
  while (true) {
    peer.flush();
    const bool late = std::chrono::steady_clock::now() >= deadline;
    if (late || !process::wait_for(peer.socket, POLLIN, deadline)) return {};
    const State received = peer.receive();
    if (peer.take_frames(take) == State::kClosed || received == State::kClosed) return answer;
  }
}

}  // namespace dynmo::elastic
