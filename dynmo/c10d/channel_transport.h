// SPDX-License-Identifier: Apache-2.0
#pragma once

// A transport of a device's memory, made of c10d groups of two ranks. NCCL has no tags and puts all
// operations of a communicator in one order. So every channel (source, destination, tag) has its
// own communicator. This file knows only c10d's interface; nccl_transport.h has the groups.
//
// Both ranks take part in making a communicator. So all ranks open the channels of a schedule in
// one order before they run it. Channels stay open, and a plan that returns finds its own. They
// belong to one group of ranks, and end with it (docs/decisions/042-channels-of-a-generation.md).

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <thread>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/transport/place.h"
#include "dynmo/transport/transport.h"

namespace c10d {
class Backend;
}

namespace dynmo::c10d {

struct Channel {
  WorldRank from;
  WorldRank to;
  transport::Tag tag = 0;
  friend auto operator<=>(const Channel&, const Channel&) = default;
};

struct ChannelOptions {
  WorldRank rank;
  int size = 1;
  at::Device device = at::kCPU;  // device of the bytes of sends and receives
  // Makes the group of a channel, with the source as rank 0 and the destination as rank 1. Returns
  // when both ranks have called it. `opening` is the number of earlier calls of close(). May throw.
  // Runs on its own thread. If it does not return after a failure, the thread outlives the
  // transport.
  std::function<c10::intrusive_ptr<::c10d::Backend>(const Channel&, int opening)> connect;
  // Returns the failure of the ranks' other transport, if there is one. Called at intervals,
  // because a device waits for a lost rank forever unless the groups are aborted.
  std::function<std::optional<Error>()> failure = [] { return std::optional<Error>(); };
  // Longest wait for groups that close or are aborted. After it their threads are left behind.
  std::chrono::milliseconds patience{10000};
};

class SideCalls;  // running on threads of their own

// A Transport between the devices of ranks. It follows the rules of transport.h with two
// exceptions. The bytes are in the memory of `device`. The host does not wait: wait() returns when
// the device's current stream will wait for them. Only a channel that was opened may be used.
//
// A failure aborts all groups at the same time, since a kernel of one may be queued behind one of
// another. The threads that abort do not wait for the device. Bytes received then must not be used:
// failure() is set before a wait for the device returns.
class ChannelTransport final : public transport::Transport {
 public:
  explicit ChannelTransport(ChannelOptions options);
  // Aborts the channels that are open.
  ~ChannelTransport() override;

  // Opens the channels of this rank that are not open yet. All ranks of the group call it with
  // equal channels, at the same point of their work. Fails with kPeerLost.
  [[nodiscard]] Expected<void> open(std::span<const Channel> channels);
  // Waits for the device and closes the channels, which open() may open again. All ranks of the
  // group call it when they have waited for all messages. Fails with kPeerLost.
  [[nodiscard]] Expected<void> close();
  // Returns the failure, if the transport has failed. Any thread may call.
  [[nodiscard]] std::optional<Error> failure() const;
  // Returns a function that returns whether a message is in flight, so that the device may wait for
  // a peer. Any thread may call it, also when the transport has ended.
  [[nodiscard]] std::function<bool()> in_flight() const;

  [[nodiscard]] transport::Member rank() const override {
    return transport::Member(options_.rank.value);
  }
  [[nodiscard]] int size() const override { return options_.size; }
  std::unique_ptr<transport::Operation> send(transport::Member to, transport::Tag tag,
                                             std::span<const std::byte> bytes) override;
  std::unique_ptr<transport::Operation> receive(transport::Member from, transport::Tag tag,
                                                std::span<std::byte> bytes) override;
  // Returns when the channels are aborted and no longer access memory of the device.
  void abort(const Error& why) override;

 private:
  struct State;
  std::unique_ptr<transport::Operation> post(const Channel& channel, std::span<std::byte> bytes);
  void watch(const std::stop_token& stop);
  [[nodiscard]] Expected<void> connect(const Channel& channel);
  [[nodiscard]] std::optional<Error> failure_before(const SideCalls& calls);

  [[nodiscard]] WorldRank self() const { return options_.rank; }

  ChannelOptions options_;
  int opening_ = 0;
  std::shared_ptr<State> state_;  // shared with the operations
  // Last, because it uses the other members.
  std::jthread watcher_;
};

}  // namespace dynmo::c10d
