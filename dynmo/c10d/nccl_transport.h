// SPDX-License-Identifier: Apache-2.0
#pragma once

// Device memory between ranks that have a CUDA device each: a ChannelTransport whose groups are
// c10d's NCCL groups. Each has a stream of its own beside that of the computation.

#include <memory>
#include <string>

#include "dynmo/c10d/c10d_transport.h"
#include "dynmo/c10d/channel_transport.h"
#include "dynmo/core/expected.h"

namespace dynmo::c10d {

struct NcclTransport {
  std::unique_ptr<ChannelTransport> channels;  // null: messages pass through host memory
  std::string why_not;                         // then, for people
};

// Called by all ranks of `group`, of `options`, which outlives the result; all get channels, or
// none does: this build has no NCCL on some rank, or two ranks share a device, which NCCL refuses.
// kPeerLost.
[[nodiscard]] Expected<NcclTransport> connect_nccl(Group& group, const GroupOptions& options,
                                                   at::Device device);

}  // namespace dynmo::c10d
