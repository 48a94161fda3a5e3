// SPDX-License-Identifier: Apache-2.0
#include "dynmo/c10d/nccl_transport.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "dynmo/c10d/nccl_impl.h"
#include "dynmo/c10d/store_impl.h"
#include "dynmo/core/check.h"
#include "dynmo/process/kernel_ids.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::c10d {
namespace {

// libdynmo_nccl.so stays loaded: its groups have threads.
struct Library {
  ConnectNccl* connect = nullptr;
  NameCudaDevice* name_device = nullptr;
  NcclVersion* version = nullptr;
};

Library load_library() {
  void* library = ::dlopen("libdynmo_nccl.so", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {};
  return {reinterpret_cast<ConnectNccl*>(::dlsym(library, kConnectNccl)),
          reinterpret_cast<NameCudaDevice*>(::dlsym(library, kNameCudaDevice)),
          reinterpret_cast<NcclVersion*>(::dlsym(library, kNcclVersion))};
}

// Returns a name of the device that is unique in the job. Returns "" if there is none, or no NCCL.
std::string device_name(const Library& library, at::Device device) {
  if (library.connect == nullptr || library.name_device == nullptr) return "";
  std::string name;
  library.name_device(device, name);
  const std::string host = process::boot_id();
  return name.empty() || host.empty() ? "" : fmt::format("{} {}", host, name);
}

}  // namespace

Expected<NcclTransport> connect_channels(Group& group, at::Device device,
                                         const ChannelMaker& maker) {
  NcclTransport result;
  DYNMO_ASSIGN(const std::vector<Json> said,
               transport::gather_json(group, transport::control_tag(transport::Control::kDevices),
                                      to_json(maker.offer), "what a rank says of its device"));
  std::vector<DeviceOffer> offers;
  for (const Json& json : said) {
    DYNMO_ASSIGN(offers.emplace_back(), parse_offer(json));
  }
  ChannelRule rule = channel_rule(offers);
  result.why = std::move(rule.why);
  if (!rule.has_channels) return result;
  // A key of the store is set once, so a channel that is opened again uses other keys.
  const auto connect = [make = maker.make, words = group.words()->keys,
                        own = WorldRank(group.rank().value)](const Channel& channel, int opening) {
    const auto store = c10::make_intrusive<::c10d::PrefixStore>(
        fmt::format("channel/{}/{}-{}-{}", opening, channel.from, channel.to, channel.tag), words);
    return make(store, channel.from == own ? 0 : 1);
  };
  result.channels = std::make_unique<ChannelTransport>(
      ChannelOptions{.rank = WorldRank(group.rank().value),
                     .size = group.size(),
                     .device = device,
                     .connect = connect,
                     .failure = [&group] { return group.failure(); }});
  return result;
}

Expected<NcclTransport> connect_nccl(Group& group, const GroupOptions& options, at::Device device) {
  const Library library = load_library();
  ChannelMaker maker;
  maker.offer.device = device_name(library, device);
  if (library.version != nullptr) maker.offer.version = library.version();
  read_sharing(maker.offer);
  maker.make = [library, device, timeout = options.message_timeout](
                   const c10::intrusive_ptr<::c10d::Store>& store, int rank) {
    c10::intrusive_ptr<::c10d::Backend> made;
    library.connect({.store = store, .rank = rank, .device = device, .timeout = timeout}, made);
    return made;
  };
  return connect_channels(group, device, maker);
}

}  // namespace dynmo::c10d
