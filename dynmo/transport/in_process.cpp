// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/in_process.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "dynmo/core/check.h"

namespace dynmo::transport {
namespace {

// One end of a message. Hub::mutex guards it, except for the bytes, which belong to the side that
// set kCopying.
struct End {
  enum class State { kPosted, kCopying, kDone };
  State state = State::kPosted;
  Member owner;
  std::span<const std::byte> from;  // of a send
  std::span<std::byte> into;        // of a receive
  [[nodiscard]] std::size_t size() const { return from.empty() ? into.size() : from.size(); }
};

struct Channel {
  int source;
  int destination;
  Tag tag;
  friend auto operator<=>(const Channel&, const Channel&) = default;
};

// The posted sends and receives of a channel. At most one of the two lists is not empty.
struct Queues {
  std::deque<std::shared_ptr<End>> sends;
  std::deque<std::shared_ptr<End>> receives;
};

// The state that the ranks share. Any thread may call it. The mutex guards all members but
// constants. Empty queues are erased, so that new tags need no more memory.
class Hub {
 public:
  Hub(int size, std::chrono::milliseconds deadline)
      : deadline_(deadline), arrived_(static_cast<std::size_t>(size)), gone_(arrived_.size()) {}

  [[nodiscard]] int size() const { return static_cast<int>(arrived_.size()); }

  void post(const Channel& channel, const std::shared_ptr<End>& end);
  Expected<void> wait(const Channel& channel, const std::shared_ptr<End>& end);
  void forget(const Channel& channel, const std::shared_ptr<End>& end);
  void fail(const Error& why);
  void leave(Member rank);

 private:
  void fail_locked(const Error& why);
  std::shared_ptr<End> match_locked(const Channel& channel, const std::shared_ptr<End>& end);
  static std::string describe(const Channel& channel, std::size_t bytes);

  const std::chrono::milliseconds deadline_;
  std::mutex mutex_;
  std::map<Channel, Queues> posted_;
  std::vector<std::condition_variable> arrived_;  // by rank: one of its operations is done
  std::vector<bool> gone_;                        // by rank
  std::optional<Error> error_;
};

std::string Hub::describe(const Channel& channel, std::size_t bytes) {
  return fmt::format("message of {} bytes from rank {} to rank {} with tag {}", bytes,
                     channel.source, channel.destination, channel.tag);
}

void Hub::fail_locked(const Error& why) {
  if (error_) return;
  error_ = why;
  posted_.clear();
  for (auto& condition : arrived_) condition.notify_all();
}

void Hub::fail(const Error& why) {
  const std::lock_guard lock(mutex_);
  fail_locked(why);
}

// Returns the other end if it is posted, removed from its queue, with both ends in state kCopying.
// Otherwise queues this end and returns null.
std::shared_ptr<End> Hub::match_locked(const Channel& channel, const std::shared_ptr<End>& end) {
  if (error_) return nullptr;
  for (const int rank : {channel.source, channel.destination}) {
    if (gone_[static_cast<std::size_t>(rank)]) {
      fail_locked(make_error(ErrorCode::kPeerLost, "rank {} has left the group: {} cannot pass",
                             rank, describe(channel, end->size())));
      return nullptr;
    }
  }
  auto& queues = posted_[channel];
  const bool sending = !end->from.empty();
  auto& mine = sending ? queues.sends : queues.receives;
  auto& theirs = sending ? queues.receives : queues.sends;
  if (theirs.empty()) {
    mine.push_back(end);
    return nullptr;
  }
  const std::shared_ptr<End> other = theirs.front();
  theirs.pop_front();
  if (theirs.empty()) posted_.erase(channel);
  if (other->size() != end->size()) {
    fail_locked(make_error(ErrorCode::kInternal,
                           "{} meets a receive of {} bytes: both ends must name the same number",
                           describe(channel, sending ? end->size() : other->size()),
                           sending ? other->size() : end->size()));
    return nullptr;
  }
  end->state = other->state = End::State::kCopying;
  return other;
}

void Hub::post(const Channel& channel, const std::shared_ptr<End>& end) {
  std::shared_ptr<End> other;
  {
    const std::lock_guard lock(mutex_);
    other = match_locked(channel, end);
  }
  if (other == nullptr) return;
  // Copies without the lock, so that a large message does not delay other ranks.
  const End& send = end->from.empty() ? *other : *end;
  const End& receive = end->from.empty() ? *end : *other;
  std::memcpy(receive.into.data(), send.from.data(), send.from.size());
  const std::lock_guard lock(mutex_);
  end->state = other->state = End::State::kDone;
  arrived_[other->owner.index()].notify_all();
}

Expected<void> Hub::wait(const Channel& channel, const std::shared_ptr<End>& end) {
  std::unique_lock lock(mutex_);
  // Waits for a copy that has begun even if the group has failed, because the bytes are in use.
  const auto settled = [&] {
    return end->state == End::State::kDone || (error_ && end->state == End::State::kPosted);
  };
  if (!arrived_[end->owner.index()].wait_for(lock, deadline_, settled)) {
    const int peer = end->owner == Member(channel.source) ? channel.destination : channel.source;
    fail_locked(make_error(ErrorCode::kPeerLost, "rank {} waited {} ms for rank {}: {}",
                           end->owner.value, deadline_.count(), peer,
                           describe(channel, end->size())));
    arrived_[end->owner.index()].wait(lock, settled);
  }
  if (error_) return *error_;
  return {};
}

void Hub::forget(const Channel& channel, const std::shared_ptr<End>& end) {
  std::unique_lock lock(mutex_);
  if (end->state == End::State::kDone) return;
  fail_locked(make_error(ErrorCode::kInternal,
                         "rank {} dropped an operation that it had not waited for: {}",
                         end->owner.value, describe(channel, end->size())));
  arrived_[end->owner.index()].wait(lock, [&] { return end->state != End::State::kCopying; });
}

void Hub::leave(Member rank) {
  const std::lock_guard lock(mutex_);
  gone_[rank.index()] = true;
  for (const auto& [channel, queues] : posted_) {
    if (channel.source != rank.value && channel.destination != rank.value) continue;
    if (queues.sends.empty() && queues.receives.empty()) continue;
    const auto& waiting = queues.sends.empty() ? queues.receives.front() : queues.sends.front();
    fail_locked(make_error(ErrorCode::kPeerLost, "rank {} has left the group: {} cannot pass",
                           rank.value, describe(channel, waiting->size())));
    return;
  }
}

class InProcessOperation final : public Operation {
 public:
  InProcessOperation(std::shared_ptr<Hub> hub, const Channel& channel, std::shared_ptr<End> end)
      : hub_(std::move(hub)), channel_(channel), end_(std::move(end)) {}
  ~InProcessOperation() override {
    if (!waited_) hub_->forget(channel_, end_);
  }

  Expected<void> wait() override {
    DYNMO_CHECK(!waited_, "one wait an operation, got a second");
    waited_ = true;
    return hub_->wait(channel_, end_);
  }

 private:
  std::shared_ptr<Hub> hub_;
  Channel channel_;
  std::shared_ptr<End> end_;
  bool waited_ = false;
};

class InProcessTransport final : public Transport {
 public:
  InProcessTransport(std::shared_ptr<Hub> hub, Member rank) : hub_(std::move(hub)), rank_(rank) {}
  ~InProcessTransport() override { hub_->leave(rank_); }

  [[nodiscard]] Member rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return hub_->size(); }

  std::unique_ptr<Operation> send(Member to, Tag tag, std::span<const std::byte> bytes) override {
    check(to, tag, bytes.size());
    auto end = std::make_shared<End>();
    end->from = bytes;
    return post({rank_.value, to.value, tag}, std::move(end));
  }
  std::unique_ptr<Operation> receive(Member from, Tag tag, std::span<std::byte> bytes) override {
    check(from, tag, bytes.size());
    auto end = std::make_shared<End>();
    end->into = bytes;
    return post({from.value, rank_.value, tag}, std::move(end));
  }

  void abort(const Error& why) override { hub_->fail(why); }

 private:
  void check(Member peer, Tag tag, std::size_t bytes) const {
    DYNMO_CHECK(peer != rank_ && peer.value >= 0 && peer.value < size(),
                "a peer of rank {} in a group of {}, got {}", rank_, size(), peer);
    DYNMO_CHECK(tag >= 0, "a tag of at least 0, got {}", tag);
    DYNMO_CHECK(bytes > 0, "a message of at least one byte");
  }
  std::unique_ptr<Operation> post(const Channel& channel, std::shared_ptr<End> end) {
    end->owner = rank_;
    hub_->post(channel, end);
    return std::make_unique<InProcessOperation>(hub_, channel, std::move(end));
  }

  std::shared_ptr<Hub> hub_;
  Member rank_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_in_process_group(int size,
                                                              const InProcessOptions& options) {
  DYNMO_CHECK(size >= 1, "a group of at least one rank, got {}", size);
  auto hub = std::make_shared<Hub>(size, options.deadline);
  std::vector<std::unique_ptr<Transport>> group;
  for (int rank = 0; rank < size; ++rank) {
    group.push_back(std::make_unique<InProcessTransport>(hub, Member(rank)));
  }
  return group;
}

Expected<void> run_ranks(int size, const std::function<Expected<void>(Transport&)>& rank,
                         const InProcessOptions& options) {
  auto group = make_in_process_group(size, options);
  std::mutex mutex;
  std::optional<Error> first_error;
  std::exception_ptr first_exception;
  const auto keep = [&](Transport& transport, const Error& error, std::exception_ptr exception) {
    {
      const std::lock_guard lock(mutex);
      if (!first_error) {
        first_error = error;
        first_exception = std::move(exception);
      }
    }
    transport.abort(error);
  };
  // Each thread owns its transport: a rank that ends while others still wait for it is lost.
  const auto run = [&](std::unique_ptr<Transport> transport) {
    check_context().rank = transport->rank().value;
    try {
      const auto done = rank(*transport);
      if (!done) keep(*transport, done.error(), nullptr);
    } catch (const std::exception& fault) {
      keep(*transport,
           make_error(ErrorCode::kInternal, "rank {}: {}", transport->rank(), fault.what()),
           std::current_exception());
    } catch (...) {
      keep(*transport, make_error(ErrorCode::kInternal, "rank {}: an exception", transport->rank()),
           std::current_exception());
    }
  };
  {
    std::vector<std::jthread> threads;
    for (auto& transport : group) threads.emplace_back(run, std::move(transport));
  }
  if (first_exception) std::rethrow_exception(first_exception);
  if (first_error) return *first_error;
  return {};
}

}  // namespace dynmo::transport
