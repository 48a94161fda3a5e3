// SPDX-License-Identifier: Apache-2.0
#pragma once

// Channels between ranks that are threads, on the strict device.

#include <fmt/format.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "dynmo/c10d/channel_transport.h"
#include "dynmo/transport/transport.h"
#include "tests/support/strict_device/strict_channels.h"

namespace dynmo::testing {

// Returns the options of a rank's channels, which meet in `words`, a store of the group.
inline c10d::ChannelOptions strict_channel_options(const transport::Transport& group,
                                                   at::Device device,
                                                   const c10::intrusive_ptr<::c10d::Store>& words) {
  return {.rank = WorldRank(group.rank().value),
          .size = group.size(),
          .device = device,
          .connect = [words, device, own = group.rank().value](const c10d::Channel& channel,
                                                               int opening) {
            const auto store = c10::make_intrusive<::c10d::PrefixStore>(
                fmt::format("{}/{}-{}-{}", opening, channel.from, channel.to, channel.tag), words);
            return strict::connect_pair(store, channel.from.value == own ? 0 : 1, device);
          }};
}

inline std::unique_ptr<c10d::ChannelTransport> strict_channels(
    const transport::Transport& group, at::Device device,
    const c10::intrusive_ptr<::c10d::Store>& words) {
  return std::make_unique<c10d::ChannelTransport>(strict_channel_options(group, device, words));
}

}  // namespace dynmo::testing
