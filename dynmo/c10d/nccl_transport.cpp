// SPDX-License-Identifier: Apache-2.0
#include "dynmo/c10d/nccl_transport.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <set>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "dynmo/c10d/nccl_impl.h"
#include "dynmo/c10d/store_impl.h"
#include "dynmo/core/check.h"
#include "dynmo/core/files.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::c10d {
namespace {

// libdynmo_nccl.so stays loaded: its groups have threads.
struct Library {
  ConnectNccl* connect = nullptr;
  NameCudaDevice* name_device = nullptr;
};

Library load_library() {
  void* library = ::dlopen("libdynmo_nccl.so", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {};
  return {reinterpret_cast<ConnectNccl*>(::dlsym(library, kConnectNccl)),
          reinterpret_cast<NameCudaDevice*>(::dlsym(library, kNameCudaDevice))};
}

// Names this device among all of the job; "" where that, or NCCL, cannot be known.
std::string device_name(const Library& library, at::Device device) {
  if (library.connect == nullptr || library.name_device == nullptr) return "";
  std::string name;
  library.name_device(device, name);
  const auto host = read_file("/proc/sys/kernel/random/boot_id");
  if (name.empty() || !host) return "";
  return fmt::format("{} {}", *host, name);
}

}  // namespace

Expected<NcclTransport> connect_nccl(Group& group, const GroupOptions& options, at::Device device) {
  NcclTransport result;
  if (group.size() == 1) return result;
  const Library library = load_library();
  DYNMO_ASSIGN(const auto names,
               transport::gather_texts(group, transport::control_tag(transport::Control::kDevices),
                                       device_name(library, device)));
  const std::set<std::string> different(names.begin(), names.end());
  if (different.contains("")) {
    result.why_not = "not every rank has libdynmo_nccl.so (docs/clusters.md)";
  } else if (different.size() < names.size()) {
    result.why_not = fmt::format("{} ranks share {} devices", names.size(), different.size());
  }
  if (!result.why_not.empty()) return result;

  const auto prefix = c10::make_intrusive<::c10d::PrefixStore>(
      fmt::format("dynmo-nccl/{}/{}", options.attempt, options.generation), group.store()->keys);
  const auto connect = [library, prefix, device, own = WorldRank(group.rank().value),
                        timeout = options.message_timeout](const Channel& channel) {
    const auto store = c10::make_intrusive<::c10d::PrefixStore>(
        fmt::format("{}-{}-{}", channel.from, channel.to, channel.tag), prefix);
    c10::intrusive_ptr<::c10d::Backend> made;
    library.connect(
        {.store = store, .rank = channel.from == own ? 0 : 1, .device = device, .timeout = timeout},
        made);
    return made;
  };
  result.channels = std::make_unique<ChannelTransport>(
      ChannelOptions{.rank = WorldRank(group.rank().value),
                     .size = group.size(),
                     .device = device,
                     .connect = connect,
                     .failure = [&group] { return group.failure(); }});
  return result;
}

}  // namespace dynmo::c10d
