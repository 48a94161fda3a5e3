// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/device/launcher.h"

#include <atomic>
#include <map>
#include <mutex>
#include <optional>

#include "dynmo/core/check.h"

namespace dynmo::kernels::device {
namespace {

struct Launchers {
  std::mutex mutex;
  std::map<at::DeviceType, Launcher> of = {{at::kCUDA, cuda_launcher()}};
  std::atomic<bool> used = true;
};

Launchers& launchers() {
  static Launchers all;
  return all;
}

std::optional<Launcher> launcher_of(at::DeviceType type) {
  Launchers& all = launchers();
  const std::lock_guard lock(all.mutex);
  const auto found = all.of.find(type);
  if (found == all.of.end()) return std::nullopt;
  return found->second;
}

}  // namespace

void set_launcher(at::DeviceType type, const Launcher& launcher) {
  DYNMO_CHECK(launcher.why_not != nullptr && launcher.launch != nullptr, "a whole launcher");
  Launchers& all = launchers();
  const std::lock_guard lock(all.mutex);
  all.of[type] = launcher;
}

void use_kernels(bool used) { launchers().used = used; }

std::string why_no_kernels(at::Device device) {
  if (!launchers().used) return "run.fused_kernels = false";
  const auto launcher = launcher_of(device.type());
  return launcher ? launcher->why_not(device) : "none are made for this kind of device";
}

void launch(const Call& call) {
  const auto launcher = launcher_of(call.device.type());
  DYNMO_CHECK(launcher && call.blocks > 0, "a device with kernels, and blocks, got {} and {}",
              call.device.str(), call.blocks);
  launcher->launch(call);
}

Packed packed(const Call& call, const std::function<void*(const Operand&)>& address_of) {
  Packed result;
  // Neither may grow beyond this, because `pointers` points into `addresses`.
  result.addresses.reserve(call.arguments.size());
  result.pointers.reserve(call.arguments.size());
  for (const Argument& argument : call.arguments) {
    result.pointers.push_back(std::visit(
        [&](const auto& value) -> void* {
          if constexpr (std::is_same_v<std::decay_t<decltype(value)>, Operand>) {
            result.addresses.push_back(value.tensor.defined() ? address_of(value) : nullptr);
            return &result.addresses.back();
          } else {
            // A launch takes pointers to non-const values, and copies them.
            return const_cast<void*>(static_cast<const void*>(&value));
          }
        },
        argument));
  }
  return result;
}

}  // namespace dynmo::kernels::device
