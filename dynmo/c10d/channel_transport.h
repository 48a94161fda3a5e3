// SPDX-License-Identifier: Apache-2.0
#pragma once

// A transport of a device's memory, made of c10d groups of two ranks: NCCL has no tags and puts all
// operations of a communicator in one order, so every channel (source, destination, tag) gets a
// communicator of its own. It knows c10d's interface alone; nccl_transport.h has the groups.
//
// Making a communicator takes both of its ranks, so all ranks open the channels of a schedule in
// one order before they run it. What was opened stays open: a plan that comes back finds its own.

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
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
  at::Device device = at::kCPU;  // whose memory the bytes of sends and receives are in
  // Makes the group of a channel, in which the source is rank 0 and the destination 1; returns when
  // both have called it. May throw.
  std::function<c10::intrusive_ptr<::c10d::Backend>(const Channel&)> connect;
  // Why the ranks' other transport failed, if it has. Asked for now and then: a device waits for a
  // lost rank forever unless the groups are aborted.
  std::function<std::optional<Error>()> failure = [] { return std::optional<Error>(); };
};

// The rules of transport.h but for these. The bytes are in the memory of `device`, and wait()
// returns when the device's current stream will wait for them: the host does not. Only a channel
// that was opened may be used.
class ChannelTransport final : public transport::Transport {
 public:
  explicit ChannelTransport(ChannelOptions options);
  ~ChannelTransport() override;  // all ranks, when nothing is under way any more

  // Called by all ranks of the group with equal channels, at the same point of their work. Opens
  // those of this rank that are not open yet. kPeerLost.
  [[nodiscard]] Expected<void> open(std::span<const Channel> channels);

  [[nodiscard]] transport::Member rank() const override {
    return transport::Member(options_.rank.value);
  }
  [[nodiscard]] int size() const override { return options_.size; }
  std::unique_ptr<transport::Operation> send(transport::Member to, transport::Tag tag,
                                             std::span<const std::byte> bytes) override;
  std::unique_ptr<transport::Operation> receive(transport::Member from, transport::Tag tag,
                                                std::span<std::byte> bytes) override;
  void abort(const Error& why) override;

 private:
  struct State;
  std::unique_ptr<transport::Operation> post(const Channel& channel, std::span<std::byte> bytes);
  void watch(const std::stop_token& stop);

  [[nodiscard]] WorldRank self() const { return options_.rank; }

  ChannelOptions options_;
  std::shared_ptr<State> state_;  // with the operations
  std::jthread watcher_;          // last: it uses the others
};

}  // namespace dynmo::c10d
