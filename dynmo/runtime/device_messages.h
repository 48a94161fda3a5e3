// SPDX-License-Identifier: Apache-2.0
#pragma once

// The channels on which a pipeline's activations and gradients pass between devices
// (channel_transport.h). All ranks open them together whenever the schedules have changed.

#include <memory>

#include "dynmo/c10d/channel_transport.h"
#include "dynmo/core/expected.h"
#include "dynmo/runtime/program.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

class DeviceMessages {
 public:
  // Stores `group`, which must outlive it. If `group` is null, there are no channels, and all
  // functions below do nothing.
  DeviceMessages(const transport::Grid& grid, c10d::ChannelTransport* group);

  // Returns the transport of this replica's ranks for a step, or null.
  [[nodiscard]] transport::Transport* transport() const { return transport_.get(); }
  // Returns an error if the channels have failed. Results that were waited for since the failure
  // are then invalid: aborted channels have received nothing.
  [[nodiscard]] Expected<void> check() const;
  void schedules_changed() { due_ = group_ != nullptr; }
  // Opens the channels of the schedules if schedules_changed() was called. All ranks call it at the
  // same points with the same schedules, and open the channels in one order. Fails with kPeerLost.
  [[nodiscard]] Expected<void> open(const transport::Grid& grid, const Program& program, int lane);

 private:
  c10d::ChannelTransport* group_;
  std::unique_ptr<transport::Transport> transport_;
  bool due_ = false;
};

}  // namespace dynmo::runtime
