// SPDX-License-Identifier: Apache-2.0
#pragma once

// Transfers device memory between ranks that have a CUDA device each. It is a ChannelTransport
// whose groups are c10d's NCCL groups. Each group has its own stream beside that of the
// computation.

#include <functional>
#include <memory>
#include <string>

#include "dynmo/c10d/c10d_transport.h"
#include "dynmo/c10d/channel_rule.h"
#include "dynmo/c10d/channel_transport.h"
#include "dynmo/core/expected.h"

namespace c10d {
class Store;
}

namespace dynmo::c10d {

// The channels of one group of ranks.
struct NcclTransport {
  std::unique_ptr<ChannelTransport> channels;  // null if messages pass through host memory
  std::string why;                             // why they are there or not, for the user
};

// The means by which this rank makes channels.
struct ChannelMaker {
  DeviceOffer offer;
  // Makes this rank's end of a group of ranks 0 and 1, which meet in `store`. Returns when both are
  // connected. May throw.
  std::function<c10::intrusive_ptr<::c10d::Backend>(const c10::intrusive_ptr<::c10d::Store>& store,
                                                    int rank)>
      make;
};

// Connects the channels of `group`, which must outlive the result. All ranks of the group call it,
// and all get channels or none does (channel_rule.h). The ranks of a channel meet through the
// group's control plane (Group::words). So they need no store of the run, and a lost rank ends the
// meeting. Fails with kPeerLost.
[[nodiscard]] Expected<NcclTransport> connect_channels(Group& group, at::Device device,
                                                       const ChannelMaker& maker);

// Like connect_channels(), with NCCL. `options` are those of the group.
[[nodiscard]] Expected<NcclTransport> connect_nccl(Group& group, const GroupOptions& options,
                                                   at::Device device);

}  // namespace dynmo::c10d
