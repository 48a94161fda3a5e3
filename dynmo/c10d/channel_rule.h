// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rule by which the ranks of a group have channels between their devices, or send through host
// memory. It is a function of what all ranks say. So all decide alike, and it needs no library.
//
// NCCL refuses two ranks on a device. From 2.30 on it takes them if NCCL_MULTI_RANK_GPU_ENABLE=1 is
// in the environment of every rank. It has room for two ranks on a device. A smaller NCCL_MAX_CTAS
// makes room for more. Without that room it hangs.

#include <span>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"

namespace dynmo::c10d {

// The words of a rank on its device and its NCCL.
struct DeviceOffer {
  // The device's name among all of the job. "": there is no NCCL, or the device is unknown.
  std::string device = {};
  int version = 0;           // of NCCL, as ncclGetVersion has it: 23003 is 2.30.3
  bool may_share = false;    // NCCL_MULTI_RANK_GPU_ENABLE is 1
  bool limits_ctas = false;  // NCCL_MAX_CTAS is set
};
[[nodiscard]] Json to_json(const DeviceOffer& offer);
[[nodiscard]] Expected<DeviceOffer> parse_offer(const Json& json);

// Sets the two last fields by the environment variables of this process.
void read_sharing(DeviceOffer& offer);

struct ChannelRule {
  bool has_channels = false;
  std::string why;  // for the user
};
// Decides for the ranks of a group, of which each has made an offer.
[[nodiscard]] ChannelRule channel_rule(std::span<const DeviceOffer> ranks);

}  // namespace dynmo::c10d
