// SPDX-License-Identifier: Apache-2.0
#pragma once

// Transfers device memory between ranks that have a CUDA device each. It is a ChannelTransport
// whose groups are c10d's NCCL groups. Each group has its own stream beside that of the
// computation.

#include <memory>
#include <string>

#include "dynmo/c10d/c10d_transport.h"
#include "dynmo/c10d/channel_transport.h"
#include "dynmo/core/expected.h"

namespace dynmo::c10d {

struct NcclTransport {
  std::unique_ptr<ChannelTransport> channels;  // null if messages pass through host memory
  std::string why_not;                         // reason for the user, if null
};

// Connects the channels of `group`, which was made with `options` and must outlive the result. All
// ranks of the group call it, and all get channels or none does. There are none if some rank's
// build has no NCCL, or if two ranks share a device, which NCCL refuses. Fails with kPeerLost.
[[nodiscard]] Expected<NcclTransport> connect_nccl(Group& group, const GroupOptions& options,
                                                   at::Device device);

}  // namespace dynmo::c10d
