// SPDX-License-Identifier: Apache-2.0
// The strict device as Python loads it: torch.ops.load_library, then torch.ops.strict_device.open
// (tests/support/strict_torch.py).
#include <ATen/ATen.h>
#include <torch/library.h>

#include "machine_impl.h"

namespace dynmo::strict {
namespace {

void open_device() { open(0); }

c10::Dict<std::string, std::int64_t> waits() {
  c10::Dict<std::string, std::int64_t> counted;
  for (const auto& [what, count] : take_waits()) counted.insert(what, count);
  return counted;
}

// Locks, as libtorch wants it of callers of a generator.
template <typename Call>
auto with_generator(at::DeviceIndex device, const Call& call) {
  at::Generator generator = generator_of(device);
  const std::lock_guard lock(generator.mutex());
  return call(generator);
}

void seed_all(std::int64_t seed) {
  for (at::DeviceIndex d = 0; d < kDevices; ++d) {
    with_generator(d, [&](at::Generator& generator) {
      generator.set_current_seed(static_cast<std::uint64_t>(seed));
      return 0;
    });
  }
}

at::Tensor random_state(std::int64_t device) {
  return with_generator(static_cast<at::DeviceIndex>(device),
                        [](at::Generator& generator) { return generator.get_state(); });
}

void set_random_state(std::int64_t device, const at::Tensor& state) {
  with_generator(static_cast<at::DeviceIndex>(device), [&](at::Generator& generator) {
    generator.set_state(state);
    return 0;
  });
}

c10::List<std::string> used() {
  c10::List<std::string> names;
  for (const std::string& name : operators_used()) names.push_back(name);
  return names;
}

TORCH_LIBRARY(strict_device, library) {
  library.def("open() -> ()", &open_device);
  library.def("take_waits() -> Dict(str, int)", &waits);
  library.def("operators_used() -> str[]", &used);
  library.def("seed_all(int seed) -> ()", &seed_all);
  library.def("random_state(int device) -> Tensor", &random_state);
  library.def("set_random_state(int device, Tensor state) -> ()", &set_random_state);
}

}  // namespace
}  // namespace dynmo::strict
