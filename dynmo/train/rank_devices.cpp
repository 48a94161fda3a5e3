// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/rank_devices.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "dynmo/c10d/device_kinds.h"
#include "dynmo/dynamism/early_exit/options.h"

namespace dynmo::train {

C10dGroups::Connect connects_devices(const ValidOptions& options) {
  const config::Config& config = options.config();
  if (!on_device(config)) return {};
  const c10d::DeviceKind kind = c10d::device_kind(config.run.device);
  std::string why;  // why there are no channels
  if (config.sources.enabled<dynamism::EarlyExitOptions>()) {
    why = "the number of rows changes";
  } else if (kind.connect == nullptr) {
    why = "the device has no channels";
  }
  return [why, connect = kind.connect, device = options.options().rank_device.device](
             c10d::Group& group, const c10d::GroupOptions& how) -> Expected<c10d::NcclTransport> {
    if (!why.empty()) return c10d::NcclTransport{.channels = nullptr, .why = why};
    return connect(group, how, device);
  };
}

void use_devices_of(const C10dGroups& groups, ValidOptions& options) {
  TrainOptions::RankDevice mine = options.options().rank_device;
  if (mine.device.is_cpu()) return;
  mine.way_in = [&groups, device = mine.device](const transport::Transport& group) {
    const c10d::NcclTransport& devices = groups.devices_of(group);
    return TrainOptions::DeviceWay{
        .channels = devices.channels.get(),
        .text = fmt::format("{}: activations and gradients pass {}: {}", device.str(),
                            devices.channels ? "by NCCL" : "through host memory", devices.why)};
  };
  options.use(std::move(mine));
}

}  // namespace dynmo::train
