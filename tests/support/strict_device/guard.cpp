// SPDX-License-Identifier: Apache-2.0
// Streams, events and generators of the strict device, as libtorch asks for them.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "machine_impl.h"

namespace dynmo::strict {
namespace {

using c10::DeviceIndex;
using c10::Stream;

thread_local DeviceIndex device_of_thread = 0;
thread_local std::array<std::size_t, kDevices> streams_of_thread = {0, 1};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  [[nodiscard]] c10::DeviceType type() const override { return at::kPrivateUse1; }
  [[nodiscard]] at::Device exchangeDevice(at::Device device) const override {
    const at::Device before = getDevice();
    setDevice(device);
    return before;
  }
  [[nodiscard]] at::Device getDevice() const override {
    return {at::kPrivateUse1, current_device()};
  }
  void setDevice(at::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "strict device: no device ", device.str());
    if (device.index() >= 0) current_device() = device.index();
  }
  void uncheckedSetDevice(at::Device device) const noexcept override {
    if (device.index() >= 0) current_device() = device.index();
  }
  [[nodiscard]] DeviceIndex deviceCount() const noexcept override { return kDevices; }

  [[nodiscard]] Stream getStream(at::Device device) const override {
    const DeviceIndex index = index_of(device);
    return stream_of(current_stream(index), index);
  }
  [[nodiscard]] Stream getDefaultStream(at::Device device) const override {
    return stream_of(static_cast<std::size_t>(index_of(device)), index_of(device));
  }
  [[nodiscard]] Stream getStreamFromGlobalPool(at::Device device, bool /*high*/) const override {
    return Machine::get().pooled_stream({at::kPrivateUse1, index_of(device)});
  }
  [[nodiscard]] Stream getNewStream(at::Device device, int /*priority*/) const override {
    return Machine::get().new_stream({at::kPrivateUse1, index_of(device)});
  }
  [[nodiscard]] Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_stream(stream.device_index()) = stream_number(stream);
    return before;
  }

  void destroyEvent(void* event, DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const Stream& stream, DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Event;
    Machine::get().record(*static_cast<Event*>(*event), stream_number(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) Machine::get().block(*static_cast<Event*>(event), stream_number(stream));
  }
  // A caller that asks again and again gets its answer: the second question waits.
  [[nodiscard]] bool queryEvent(void* asked) const override {
    if (asked == nullptr) return true;
    Event& event = *static_cast<Event*>(asked);
    if (!Machine::get().is_past(event) && std::exchange(event.asked, true)) {
      Machine::get().wait_for_event(event);
    }
    return Machine::get().is_past(event);
  }
  [[nodiscard]] bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    Machine::get().wait_for_stream(stream_number(stream), "synchronize stream");
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Machine::get().wait_for_event(*static_cast<Event*>(event));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Machine::get().wait_for_device(device < 0 ? current_device() : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    if (data.get_context() == nullptr) return;
    Machine::get().name_as_user(data.get_context(), stream_number(stream));
  }
  [[nodiscard]] double elapsedTime(void* from, void* to, DeviceIndex /*index*/) const override {
    const Event& first = *static_cast<Event*>(from);
    const Event& last = *static_cast<Event*>(to);
    TORCH_CHECK(Machine::get().is_past(first) && Machine::get().is_past(last),
                "strict device: the time of an event that the host has not waited for");
    return std::chrono::duration<double, std::milli>(*last.when - *first.when).count();
  }

 private:
  static DeviceIndex index_of(at::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    return Machine::get().allocate_pinned(bytes);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  [[nodiscard]] bool isBuilt() const override { return true; }
  [[nodiscard]] bool isAvailable() const override { return true; }
  [[nodiscard]] bool hasPrimaryContext(DeviceIndex /*index*/) const override { return true; }
  [[nodiscard]] DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { current_device() = device; }
  [[nodiscard]] DeviceIndex getCurrentDevice() const override { return current_device(); }
  [[nodiscard]] const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return generator_of(index < 0 ? current_device() : index);
  }
  [[nodiscard]] at::Generator getNewGenerator(DeviceIndex /*index*/) const override {
    return at::detail::createCPUGenerator();
  }
  [[nodiscard]] at::Device getDeviceFromPtr(void* at) const override {
    TORCH_CHECK(Machine::get().is_device(at), "strict device: memory of another device");
    return {at::kPrivateUse1, Machine::get().block_at(at)->device};
  }
  [[nodiscard]] bool isPinnedPtr(const void* at) const override {
    return Machine::get().is_pinned(at);
  }
  [[nodiscard]] at::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& /*storage*/,
                              std::size_t /*size*/) const override {
    TORCH_CHECK(false, "strict device: a storage that grows");
  }
};

}  // namespace

at::DeviceIndex& current_device() { return device_of_thread; }

const at::Generator& generator_of(at::DeviceIndex device) {
  static const std::array<at::Generator, kDevices> kGenerators = {at::detail::createCPUGenerator(),
                                                                  at::detail::createCPUGenerator()};
  return kGenerators.at(static_cast<std::size_t>(device));
}

std::size_t& current_stream(at::DeviceIndex device) {
  return streams_of_thread.at(static_cast<std::size_t>(device));
}

std::size_t stream_number(const c10::Stream& stream) {
  return stream.id() == 0 ? static_cast<std::size_t>(stream.device_index())
                          : static_cast<std::size_t>(stream.id());
}

c10::Stream stream_of(std::size_t number, at::DeviceIndex device) {
  const c10::StreamId id = number < kDevices ? 0 : static_cast<c10::StreamId>(number);
  return c10::Stream(c10::Stream::UNSAFE, at::Device(at::kPrivateUse1, device), id);
}

void register_guard() {
  static const Guard kGuard;
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  const c10::impl::DeviceGuardImplRegistrar registrar(at::kPrivateUse1, &kGuard);
  c10::SetAllocator(at::kPrivateUse1, &device_allocator());
}

}  // namespace dynmo::strict
