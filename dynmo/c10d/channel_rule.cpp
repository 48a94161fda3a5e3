// SPDX-License-Identifier: Apache-2.0
#include "dynmo/c10d/channel_rule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string_view>

namespace dynmo::c10d {
namespace {

constexpr int kFirstThatShares = 23000;  // NCCL 2.30
constexpr int kRoomOfADevice = 2;        // ranks, if NCCL_MAX_CTAS is not set

std::string version_text(int version) {
  if (version == 0) return "NCCL";
  return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

// Returns the first rank for which `lacks` holds, or the number of ranks.
template <typename Lacks>
std::size_t first_that(std::span<const DeviceOffer> ranks, Lacks lacks) {
  return static_cast<std::size_t>(std::ranges::find_if(ranks, lacks) - ranks.begin());
}

// Returns why ranks cannot share devices, or "" if they can.
std::string against_sharing(std::span<const DeviceOffer> ranks, int most_on_a_device) {
  if (ranks.front().version < kFirstThatShares) {
    return fmt::format("{} refuses that, NCCL 2.30 and newer allow it",
                       version_text(ranks.front().version));
  }
  const std::size_t strict = first_that(ranks, [](const auto& rank) { return !rank.may_share; });
  if (strict < ranks.size()) {
    return fmt::format("{} allows it where NCCL_MULTI_RANK_GPU_ENABLE=1, which rank {} lacks",
                       version_text(ranks.front().version), strict);
  }
  const std::size_t wide = first_that(ranks, [](const auto& rank) { return !rank.limits_ctas; });
  if (most_on_a_device > kRoomOfADevice && wide < ranks.size()) {
    return fmt::format("{} ranks on one need a smaller NCCL_MAX_CTAS, which rank {} lacks",
                       most_on_a_device, wide);
  }
  return "";
}

}  // namespace

Json to_json(const DeviceOffer& offer) {
  return {{"device", offer.device},
          {"version", offer.version},
          {"may_share", offer.may_share},
          {"limits_ctas", offer.limits_ctas}};
}

Expected<DeviceOffer> parse_offer(const Json& json) {
  JsonObject object(json, "what a rank says of its device");
  DeviceOffer offer;
  offer.device = object.string("device");
  offer.version = static_cast<int>(object.integer("version"));
  offer.may_share = object.boolean("may_share");
  offer.limits_ctas = object.boolean("limits_ctas");
  DYNMO_TRY(object.finish());
  return offer;
}

void read_sharing(DeviceOffer& offer) {
  const char* const share = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  offer.may_share = share != nullptr && std::string_view(share) == "1";
  const char* const ctas = std::getenv("NCCL_MAX_CTAS");
  offer.limits_ctas = ctas != nullptr && *ctas != '\0';
}

ChannelRule channel_rule(std::span<const DeviceOffer> ranks) {
  if (ranks.size() < 2) return {false, "there is one rank"};
  const std::size_t unknown =
      first_that(ranks, [](const auto& rank) { return rank.device.empty(); });
  if (unknown < ranks.size()) {
    return {false, "not every rank has libdynmo_nccl.so (docs/clusters.md)"};
  }
  const int version = ranks.front().version;
  const std::size_t other =
      first_that(ranks, [&](const auto& rank) { return rank.version != version; });
  if (other < ranks.size()) {
    return {false, fmt::format("rank 0 has {} and rank {} has {}", version_text(version), other,
                               version_text(ranks[other].version))};
  }
  std::map<std::string_view, int> on_device;
  for (const DeviceOffer& rank : ranks) ++on_device[rank.device];
  const int most =
      std::ranges::max_element(on_device, {}, [](const auto& one) { return one.second; })->second;
  if (most == 1) {
    return {true, fmt::format("{}, a device for each rank", version_text(version))};
  }
  const std::string shared = fmt::format("{} ranks share {} {}", ranks.size(), on_device.size(),
                                         on_device.size() == 1 ? "device" : "devices");
  const std::string against = against_sharing(ranks, most);
  if (!against.empty()) return {false, fmt::format("{}: {}", shared, against)};
  return {true, fmt::format("{}, {}", version_text(version), shared)};
}

}  // namespace dynmo::c10d
