// SPDX-License-Identifier: Apache-2.0
#include "dynmo/c10d/channel_transport.h"

#include <ATen/ATen.h>

#include <chrono>
#include <condition_variable>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::c10d {
namespace {

constexpr std::chrono::milliseconds kLookEvery{100};
constexpr int kSource = 0;  // ranks of a channel's group
constexpr int kDestination = 1;

std::string first_line(const std::exception& exception) {
  const std::string text = exception.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

// Any thread may call.
struct ChannelTransport::State {
  mutable std::mutex mutex;  // guards all below
  std::map<Channel, c10::intrusive_ptr<::c10d::Backend>> groups;
  std::optional<Error> why;  // it failed

  [[nodiscard]] std::optional<Error> failure() const {
    const std::lock_guard lock(mutex);
    return why;
  }
  void fail(const Error& error) {
    const std::lock_guard lock(mutex);
    if (why) return;
    why = error;
    for (const auto& [channel, group] : groups) group->abort();
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

}  // namespace

ChannelTransport::ChannelTransport(ChannelOptions options)
    : options_(std::move(options)),
      state_(std::make_shared<State>()),
      watcher_([this](const std::stop_token& stop) { watch(stop); }) {}

ChannelTransport::~ChannelTransport() {
  watcher_.request_stop();
  watcher_.join();
  if (state_->failure()) return;
  for (const auto& [channel, group] : state_->groups) group->shutdown();
}

void ChannelTransport::watch(const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any stopped;
  std::unique_lock lock(mutex);
  while (!stop.stop_requested()) {
    stopped.wait_for(lock, stop, kLookEvery, [] { return false; });
    if (const auto failure = options_.failure()) return abort(*failure);
  }
}

void ChannelTransport::abort(const Error& why) { state_->fail(why); }

Expected<void> ChannelTransport::open(std::span<const Channel> channels) {
  for (const Channel& channel : channels) {
    if (channel.from != self() && channel.to != self()) continue;
    {
      const std::lock_guard lock(state_->mutex);
      if (state_->why) return *state_->why;
      if (state_->groups.contains(channel)) continue;
    }
    try {
      auto group = options_.connect(channel);  // (not under the lock: it waits for the other)
      const std::lock_guard lock(state_->mutex);
      if (state_->why) group->abort();
      state_->groups.emplace(channel, std::move(group));
    } catch (const std::exception& exception) {
      const WorldRank other = channel.from == self() ? channel.to : channel.from;
      return make_error(ErrorCode::kPeerLost, "no channel between rank {} and rank {}: {}", self(),
                        other, first_line(exception));
    }
  }
  if (const auto failure = state_->failure()) return *failure;
  return {};
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
  c10::intrusive_ptr<::c10d::Backend> group;
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
    return std::make_unique<Posted>(std::move(work), fail,
                                    [state = state_] { return state->failure(); });
  } catch (const std::exception& exception) {
    return std::make_unique<Failed>(fail(first_line(exception)));
  }
}

}  // namespace dynmo::c10d
