// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/memory.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>

namespace dynmo::model {
namespace {

constexpr std::int64_t kFloat = 4;

}  // namespace

struct AllocationMeter::Impl {
  class Reporter final : public c10::MemoryReportingInfoBase {
   public:
    explicit Reporter(c10::DeviceType device) : device_(device) {}
    void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t,
                           c10::Device device) override {
      if (device.type() != device_) return;
      held += Bytes{size};
      peak = std::max(peak, held);
    }
    bool memoryProfilingEnabled() const override { return true; }

    Bytes held;
    Bytes peak;

   private:
    c10::DeviceType device_;
  };

  explicit Impl(c10::DeviceType device) : reporter(std::make_shared<Reporter>(device)) {}
  std::shared_ptr<Reporter> reporter;
  c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, reporter};
};

AllocationMeter::AllocationMeter(c10::DeviceType device) : impl_(std::make_unique<Impl>(device)) {}
AllocationMeter::~AllocationMeter() = default;
Bytes AllocationMeter::held() const { return impl_->reporter->held; }
Bytes AllocationMeter::peak() const { return impl_->reporter->peak; }

Bytes peak_device_memory(at::Device device) {
  if (device.is_cpu()) return {};
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr || !allocator->initialized()) return {};
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return Bytes{allocator->getDeviceStats(device.index()).allocated_bytes[kAll].peak};
}

Bytes parameter_bytes(const Layer& layer) {
  std::int64_t total = 0;
  for (const ParameterSpec& spec : layer.parameters()) {
    total += kFloat * c10::multiply_integers(spec.shape);
  }
  return Bytes{total};
}

Bytes copy_bytes(const Layer& layer) {
  if (layer.compute_type() == at::kFloat) return Bytes{0};
  const auto element = static_cast<std::int64_t>(c10::elementSize(layer.compute_type()));
  return Bytes{parameter_bytes(layer).value / kFloat * element};
}

Bytes buffer_bytes(const Layer& layer) {
  std::int64_t total = 0;
  for (const BufferSpec& spec : layer.buffers()) {
    total +=
        static_cast<std::int64_t>(c10::elementSize(spec.type)) * c10::multiply_integers(spec.shape);
  }
  return Bytes{total};
}

}  // namespace dynmo::model
