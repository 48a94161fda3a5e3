// SPDX-License-Identifier: Apache-2.0
#include "dynmo/c10d/channel_transport.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <system_error>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::c10d {
namespace {

using PairGroup = c10::intrusive_ptr<::c10d::Backend>;
using PairGroups = std::map<Channel, PairGroup>;
using std::chrono::milliseconds;

constexpr milliseconds kLookEvery{100};
constexpr milliseconds kConnectLook{10};  // between two looks for a failure
// Longest wait for a connecting thread after the ranks' other transport has failed.
constexpr milliseconds kGiveUpTime{1000};
constexpr int kSource = 0;  // ranks of a channel's group
constexpr int kDestination = 1;

std::string first_line(const std::exception& exception) {
  const std::string text = exception.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

// Calls of a library that may wait, each on a thread of its own. One thread starts and joins them.
// Copies share the calls.
class SideCalls {
 public:
  // Starts a call, which must own what it uses. An exception of it becomes `fault`.
  void start(std::function<void()> call) {
    std::function<void()> run = [shared = shared_, call = std::move(call)]() mutable {
      std::string fault;
      try {
        call();
      } catch (const std::exception& exception) {
        fault = first_line(exception);
      } catch (...) {
        fault = "an unknown exception";
      }
      call = nullptr;  // what it used is released here
      const std::lock_guard lock(shared->mutex);
      if (!fault.empty()) shared->fault = fault;
      --shared->running;
      shared->ended.notify_all();
    };
    std::unique_lock lock(shared_->mutex);
    ++shared_->running;
    try {
      shared_->threads.emplace_back(run);
    } catch (const std::system_error&) {  // no thread is left
      lock.unlock();
      run();
    }
  }

  // Waits for at most `time`. Returns whether all calls have returned and their threads have ended.
  [[nodiscard]] bool wait_for(milliseconds time) const {
    std::vector<std::thread> threads;
    {
      std::unique_lock lock(shared_->mutex);
      if (!shared_->ended.wait_for(lock, time, [&] { return shared_->running == 0; })) return false;
      threads.swap(shared_->threads);
    }
    for (std::thread& thread : threads) thread.join();
    return true;
  }
  // Detaches the threads of calls that have not returned.
  void leave() const {
    const std::lock_guard lock(shared_->mutex);
    for (std::thread& thread : shared_->threads) thread.detach();
    shared_->threads.clear();
  }
  [[nodiscard]] std::string fault() const {
    const std::lock_guard lock(shared_->mutex);
    return shared_->fault;
  }

 private:
  struct Shared {
    std::mutex mutex;  // guards all below
    std::condition_variable ended;
    int running = 0;
    std::string fault;
    std::vector<std::thread> threads;
  };
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

namespace {

// Aborts all groups at the same time, because the first one may wait for a kernel of the last one.
SideCalls abort_together(PairGroups groups) {
  SideCalls calls;
  for (auto& [channel, group] : groups) {
    calls.start([group = std::move(group)] { group->abort(); });
  }
  return calls;
}

}  // namespace

// The state that the transport shares with threads that abort it. Any thread may call.
struct ChannelTransport::State {
  mutable std::mutex mutex;  // guards all below
  PairGroups groups;
  std::optional<Error> why;  // it failed
  std::vector<SideCalls> aborting;
  std::deque<c10::intrusive_ptr<::c10d::Work>> posted;  // those that may be in flight

  void note_posted(c10::intrusive_ptr<::c10d::Work> work) {
    const std::lock_guard lock(mutex);
    std::erase_if(posted, [](const auto& each) { return each->isCompleted(); });
    posted.push_back(std::move(work));
  }
  [[nodiscard]] bool in_flight() const {
    const std::lock_guard lock(mutex);
    try {
      return !why &&
             std::ranges::any_of(posted, [](const auto& each) { return !each->isCompleted(); });
    } catch (const std::exception&) {  // the device has failed: it waits for nothing
      return false;
    }
  }
  [[nodiscard]] std::optional<Error> failure() const {
    const std::lock_guard lock(mutex);
    return why;
  }
  void fail(const Error& error) {
    const std::lock_guard lock(mutex);
    if (why) return;
    why = error;
    posted.clear();
    aborting.push_back(abort_together(std::exchange(groups, {})));
  }
  // Aborts groups that are not among `groups` any more.
  void abort_other(PairGroups others) {
    const std::lock_guard lock(mutex);
    aborting.push_back(abort_together(std::move(others)));
  }
  // Waits for the aborts, at most `time` for each. Returns whether there were any and all have
  // ended.
  bool finish_abort(milliseconds time) {
    std::vector<SideCalls> calls;
    {
      const std::lock_guard lock(mutex);
      calls.swap(aborting);
    }
    bool all = !calls.empty();
    for (const SideCalls& call : calls) {
      if (call.wait_for(time)) continue;
      call.leave();
      all = false;
    }
    return all;
  }
};

namespace {

class Posted final : public transport::Operation {
 public:
  explicit Posted(c10::intrusive_ptr<::c10d::Work> work, std::function<Error(std::string)> fail,
                  std::function<std::optional<Error>()> failure)
      : work_(std::move(work)), fail_(std::move(fail)), failure_(std::move(failure)) {}

  Expected<void> wait() override {
    try {
      if (!work_->wait()) return fail_("the transfer was aborted");
    } catch (const std::exception& exception) {
      return fail_(first_line(exception));
    }
    if (auto failure = failure_()) return *failure;
    return {};
  }

 private:
  c10::intrusive_ptr<::c10d::Work> work_;
  std::function<Error(std::string)> fail_;
  std::function<std::optional<Error>()> failure_;
};

class Failed final : public transport::Operation {
 public:
  explicit Failed(Error why) : why_(std::move(why)) {}
  Expected<void> wait() override { return why_; }

 private:
  Error why_;
};

void wait_for_device(at::Device device) {
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// Waits until the work of the aborted groups has ended. Afterwards their buffers may be used again.
template <typename State>
void finish_abort(State& state, const ChannelOptions& options) {
  if (!state.finish_abort(options.patience)) return;
  try {
    wait_for_device(options.device);
  } catch (const std::exception&) {  // the device has failed, and says so at its next use
    return;
  }
}

}  // namespace

ChannelTransport::ChannelTransport(ChannelOptions options)
    : options_(std::move(options)),
      state_(std::make_shared<State>()),
      watcher_([this](const std::stop_token& stop) { watch(stop); }) {}

ChannelTransport::~ChannelTransport() {
  watcher_.request_stop();
  watcher_.join();
  abort(make_error(ErrorCode::kPeerLost, "the channels of rank {} have ended", self()));
}

void ChannelTransport::watch(const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any stopped;
  std::unique_lock lock(mutex);
  while (!stop.stop_requested()) {
    stopped.wait_for(lock, stop, kLookEvery, [] { return false; });
    if (const auto failure = options_.failure()) return state_->fail(*failure);
  }
}

void ChannelTransport::abort(const Error& why) {
  state_->fail(why);
  finish_abort(*state_, options_);
}

std::optional<Error> ChannelTransport::failure() const { return state_->failure(); }

std::function<bool()> ChannelTransport::in_flight() const {
  return [state = state_] { return state->in_flight(); };
}

// Waits for `calls`. Returns the failure if this transport, or the ranks' transport in host memory,
// fails before their end.
std::optional<Error> ChannelTransport::failure_before(const SideCalls& calls) {
  while (!calls.wait_for(kConnectLook)) {
    auto failure = state_->failure();
    if (!failure) failure = options_.failure();
    if (!failure) continue;
    state_->fail(*failure);
    return failure;
  }
  return std::nullopt;
}

Expected<void> ChannelTransport::connect(const Channel& channel) {
  const auto made = std::make_shared<PairGroup>();
  SideCalls call;
  call.start([made, channel, opening = opening_, connect = options_.connect] {
    *made = connect(channel, opening);
  });
  if (const auto failure = failure_before(call)) {
    if (call.wait_for(kGiveUpTime)) {
      if (*made) state_->abort_other({{channel, std::move(*made)}});
    } else {
      call.leave();
    }
    return *failure;
  }
  if (!*made) {
    if (const auto failure = options_.failure()) return *failure;
    const WorldRank other = channel.from == self() ? channel.to : channel.from;
    return make_error(ErrorCode::kPeerLost, "no channel between rank {} and rank {}: {}", self(),
                      other, call.fault());
  }
  const std::lock_guard lock(state_->mutex);
  if (state_->why) {
    state_->aborting.push_back(abort_together({{channel, std::move(*made)}}));
    return *state_->why;
  }
  state_->groups.emplace(channel, std::move(*made));
  return {};
}

Expected<void> ChannelTransport::open(std::span<const Channel> channels) {
  for (const Channel& channel : channels) {
    if (channel.from != self() && channel.to != self()) continue;
    {
      const std::lock_guard lock(state_->mutex);
      if (state_->why) return *state_->why;
      if (state_->groups.contains(channel)) continue;
    }
    DYNMO_TRY(connect(channel));
  }
  if (const auto failure = state_->failure()) return *failure;
  return {};
}

Expected<void> ChannelTransport::close() {
  wait_for_device(options_.device);
  PairGroups closing;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->why) return *state_->why;
    closing.swap(state_->groups);
    state_->posted.clear();
  }
  ++opening_;
  if (closing.empty()) return {};
  SideCalls call;  // one after another, in the same order on both ranks: each waits for the peer's
  call.start([closing] {
    for (const auto& [channel, group] : closing) group->shutdown();
  });
  auto failure = failure_before(call);
  if (!failure && call.fault().empty()) return {};
  if (!failure) failure = options_.failure();
  const Error why = failure ? *failure
                            : make_error(ErrorCode::kPeerLost, "the channels of rank {}: {}",
                                         self(), call.fault());
  state_->fail(why);
  state_->abort_other(std::move(closing));
  finish_abort(*state_, options_);
  if (!call.wait_for(kGiveUpTime)) call.leave();
  return why;
}

std::unique_ptr<transport::Operation> ChannelTransport::send(transport::Member to,
                                                             transport::Tag tag,
                                                             std::span<const std::byte> bytes) {
  // c10d takes the bytes of both directions as not const and reads these.
  return post({self(), WorldRank(to.value), tag},
              {const_cast<std::byte*>(bytes.data()), bytes.size()});
}

std::unique_ptr<transport::Operation> ChannelTransport::receive(transport::Member from,
                                                                transport::Tag tag,
                                                                std::span<std::byte> bytes) {
  return post({WorldRank(from.value), self(), tag}, bytes);
}

std::unique_ptr<transport::Operation> ChannelTransport::post(const Channel& channel,
                                                             std::span<std::byte> bytes) {
  PairGroup group;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->why) return std::make_unique<Failed>(*state_->why);
    const auto found = state_->groups.find(channel);
    DYNMO_CHECK(found != state_->groups.end(), "a channel from rank {} to rank {} that is open",
                channel.from, channel.to);
    group = found->second;
  }
  const bool sends = channel.from == self();
  const WorldRank other = sends ? channel.to : channel.from;
  const auto fail = [state = state_, other](const std::string& what) {
    state->fail(make_error(ErrorCode::kPeerLost, "rank {} was lost: {}", other, what));
    return *state->failure();
  };
  std::vector<at::Tensor> tensors = {at::from_blob(bytes.data(),
                                                   {static_cast<std::int64_t>(bytes.size())},
                                                   at::device(options_.device).dtype(at::kByte))};
  try {
    auto work =
        sends ? group->send(tensors, kDestination, /*tag=*/0) : group->recv(tensors, kSource, 0);
    state_->note_posted(work);
    return std::make_unique<Posted>(std::move(work), fail,
                                    [state = state_] { return state->failure(); });
  } catch (const std::exception& exception) {
    return std::make_unique<Failed>(fail(first_line(exception)));
  }
}

}  // namespace dynmo::c10d
