// SPDX-License-Identifier: Apache-2.0
// Adds the strict device to the kinds of a program before its main begins: `run.device = strict`.
// Its kernels (kernels/device/kernels.cu) run on the CPU when their turn comes.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <variant>
#include <vector>

#include "dynmo/c10d/device_kinds.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/kernels/device/launcher.h"
#include "tests/support/kernels_on_host.h"
#include "tests/support/strict_device/strict_channels.h"
#include "tests/support/strict_device/strict_device.h"

namespace dynmo::strict {
namespace {

Expected<int> load_this() {
  open();
  return kDevices;
}

Expected<at::Device> open_this(int local_rank, c10d::Determinism determinism) {
  const at::Device device = open(local_rank);
  c10d::set_determinism(determinism);
  return device;
}

// DYNMO_STRICT_MEMORY: that of each device, in bytes.
Bytes memory_of_this(at::Device) {
  const char* const bytes = std::getenv("DYNMO_STRICT_MEMORY");
  return bytes == nullptr ? cost::kUnlimitedMemory : Bytes{std::atoll(bytes)};
}

// DYNMO_STRICT_NO_KERNELS: the rank of a launcher whose device has no kernels, or "new": those that
// no launcher has started.
std::string why_not_this(at::Device) {
  const char* const without = std::getenv("DYNMO_STRICT_NO_KERNELS");
  const char* const rank = std::getenv("RANK");
  const bool has =
      without == nullptr || std::string_view(rank == nullptr ? "new" : rank) != without;
  return has ? "" : "the strict device has none";
}

void launch_this(const kernels::device::Call& call) {
  std::vector<at::Tensor> read;
  std::vector<at::Tensor> written;
  for (const kernels::device::Argument& argument : call.arguments) {
    const auto* const operand = std::get_if<kernels::device::Operand>(&argument);
    if (operand == nullptr || !operand->tensor.defined()) continue;
    (operand->written ? written : read).push_back(operand->tensor);
  }
  launch(call.device, call.kernel, read, written, [call] {
    kernels::device::Packed arguments = kernels::device::packed(
        call, [](const kernels::device::Operand& operand) { return address_of(operand.tensor); });
    testing::run_kernel_on_host(call, arguments.pointers.data());
  });
}

// DYNMO_STRICT_CHANNELS: "1": each rank has a device of its own, as channels see it. "shared": all
// have one. "deaf": the same as "1", and no channel hears abort(). "": there are none.
Expected<c10d::NcclTransport> connect_this(c10d::Group& group, const c10d::GroupOptions&,
                                           at::Device device) {
  const char* const wanted = std::getenv("DYNMO_STRICT_CHANNELS");
  const std::string_view how = wanted == nullptr ? "" : wanted;
  if (how.empty()) {
    return c10d::NcclTransport{.channels = nullptr, .why = "the device has no channels"};
  }
  c10d::ChannelMaker maker;
  maker.offer.device = how == "shared" ? "strict" : fmt::format("strict of {}", ::getpid());
  if (const char* const version = std::getenv("DYNMO_STRICT_NCCL")) {
    maker.offer.version = std::atoi(version);
  }
  c10d::read_sharing(maker.offer);
  const OnAbort on_abort = how == "deaf" ? OnAbort::kIgnores : OnAbort::kEnds;
  maker.make = [device, on_abort](const c10::intrusive_ptr<::c10d::Store>& store, int rank) {
    return connect_pair(store, rank, device, on_abort);
  };
  return c10d::connect_channels(group, device, maker);
}

const bool kAdded = [] {
  kernels::device::set_launcher(at::kPrivateUse1,
                                {.why_not = &why_not_this, .launch = &launch_this});
  c10d::add_device_kind({.name = "strict",
                         .type = at::kPrivateUse1,
                         .load = &load_this,
                         .open = &open_this,
                         .memory = &memory_of_this,
                         .connect = &connect_this});
  return true;
}();

}  // namespace
}  // namespace dynmo::strict
