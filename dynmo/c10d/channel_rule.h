// SPDX-License-Identifier: Apache-2.0
#pragma once

// Decides whether the ranks of a group have channels between their devices or send through host
// memory. The rule is a function of the offers of all ranks, so all ranks decide alike.
//
// NCCL refuses two ranks on a device. From 2.30 on it takes them if NCCL_MULTI_RANK_GPU_ENABLE=1 is
// in the environment of every rank. It has room for two ranks on a device. A smaller NCCL_MAX_CTAS
// makes room for more. Without that room it hangs.

#include <span>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"

namespace dynmo::c10d {

// The facts about its device and its NCCL that a rank tells the others.
struct DeviceOffer {
  // The device's name, unique in the job. It is "" without NCCL or if the device is unknown.
  std::string device = {};
  int version = 0;           // of NCCL, as ncclGetVersion has it: 23003 is 2.30.3
  bool may_share = false;    // NCCL_MULTI_RANK_GPU_ENABLE is 1
  bool limits_ctas = false;  // NCCL_MAX_CTAS is set
};
[[nodiscard]] Json to_json(const DeviceOffer& offer);
[[nodiscard]] Expected<DeviceOffer> parse_offer(const Json& json);

// Sets the last two fields from the environment variables of this process.
void read_sharing(DeviceOffer& offer);

struct ChannelRule {
  bool has_channels = false;
  std::string why;  // for the user
};
// Applies the rule to the offers of all ranks of a group, by rank.
[[nodiscard]] ChannelRule channel_rule(std::span<const DeviceOffer> ranks);

}  // namespace dynmo::c10d
