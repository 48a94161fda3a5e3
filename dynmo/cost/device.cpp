// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/device.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <limits>
#include <utility>

#include "dynmo/core/nearest.h"

namespace dynmo::cost {
namespace {

// Links of an eight-GPU machine with one 400 Gb/s (A100: 200 Gb/s) network card for each GPU, as in
// the vendor's DGX systems. The latencies, about a kernel launch and one InfiniBand message, are
// assumptions.
constexpr double kLaunch = 5e-6;
constexpr double kMessage = 10e-6;

// NVIDIA, "H200 Tensor Core GPU" data sheet, SXM. 1,979 TFLOP/s bfloat16 with sparsity, half of
// that dense. 141 GB at 4.8 TB/s. NVLink 900 GB/s, both directions together.
Device h200() {
  Device device;
  device.name = "h200";
  device.flops_per_s = 989.4e12;
  device.bandwidth_bytes_per_s = 4.8e12;
  device.matrix_efficiency = 0.6;
  device.core_efficiency = 0.4;
  device.bandwidth_efficiency = 0.8;
  device.utilization = 0.676;  // that of the H100, on which it is calibrated
  device.memory = Bytes{141'000'000'000};
  device.inside_node = {kLaunch, 450e9};
  device.between_nodes = {kMessage, 50e9};
  return device;
}

// NVIDIA, "H100 Tensor Core GPU" data sheet, SXM: the same arithmetic, 80 GB at 3.35 TB/s. The
// utilization gives the 6,667 tokens/s a GPU of torchtitan's Llama 3.1 8B
// (benchmarks/llama3_h100_202412_torchtitan.md, table 1, FSDP and torch.compile).
Device h100() {
  Device device = h200();
  device.name = "h100";
  device.bandwidth_bytes_per_s = 3.35e12;
  device.memory = Bytes{80'000'000'000};
  return device;
}

// NVIDIA, "A100 80GB" data sheet, SXM: 312 TFLOP/s bfloat16 dense, 80 GB at 2,039 GB/s, NVLink
// 600 GB/s, both directions together. The utilization gives the 2,973 tokens/s a GPU of
// torchtitan's Llama 3 8B (its docs/performance.md of 2024, FSDP2, selective operator
// checkpointing).
Device a100() {
  Device device = h200();
  device.name = "a100";
  device.flops_per_s = 312e12;
  device.bandwidth_bytes_per_s = 2.039e12;
  device.matrix_efficiency = 0.7;
  device.core_efficiency = 0.5;
  device.utilization = 0.788;
  device.memory = Bytes{80'000'000'000};
  device.inside_node = {kLaunch, 300e9};
  device.between_nodes = {kMessage, 25e9};
  return device;
}

// Two cores with AVX-512, as we measured them. Float32 products of [m x 1024] by [1024 x 512] reach
// 271 GFLOP/s. That is not a peak but the speed of products, so their efficiency is 1. The
// bandwidth of two DDR4-2666 channels and the core's efficiency are assumptions.
Device cpu() {
  Device device;
  device.name = "cpu";
  device.flops_per_s = 271e9;
  device.bandwidth_bytes_per_s = 42.6e9;
  device.core_efficiency = 0.5;
  device.bandwidth_efficiency = 0.5;
  device.memory = Bytes{16'000'000'000};
  device.bytes_per_element = 4;
  device.bytes_per_parameter = 4;
  device.bytes_per_gradient = 4;
  device.bytes_per_optimizer = 8;  // AdamW's moments; no master copy
  device.devices_per_node = 1;
  device.inside_node = {50e-6, 3.6e9};        // processes on loopback, Gloo, measured
  device.between_nodes = {100e-6, 10e9 / 8};  // 10 Gb/s Ethernet
  return device;
}

Expected<void> check_field(const Device& device, std::string_view field, double value,
                           double most) {
  if (value > 0 && value <= most && std::isfinite(value)) return {};
  return make_error(ErrorCode::kBadInput, "device '{}': {} is {}, wanted more than 0{}",
                    device.name, field, value,
                    std::isfinite(most) ? fmt::format(" and at most {}", most) : ", finite");
}

}  // namespace

Expected<void> validate(const Device& device) {
  const std::array<std::pair<std::string_view, double>, 6> positive = {{
      {"flops_per_s", device.flops_per_s},
      {"bandwidth_bytes_per_s", device.bandwidth_bytes_per_s},
      {"memory", static_cast<double>(device.memory.value)},
      {"bytes_per_element", device.bytes_per_element},
      {"bytes_per_parameter", device.bytes_per_parameter},
      {"bytes_per_gradient", device.bytes_per_gradient},
  }};
  constexpr double kAny = std::numeric_limits<double>::infinity();
  for (const auto& [field, value] : positive) DYNMO_TRY(check_field(device, field, value, kAny));
  if (!(device.bytes_per_optimizer >= 0 && std::isfinite(device.bytes_per_optimizer))) {
    return make_error(ErrorCode::kBadInput, "device '{}': bytes_per_optimizer is {}, wanted 0 up",
                      device.name, device.bytes_per_optimizer);
  }
  DYNMO_TRY(check_field(device, "matrix_efficiency", device.matrix_efficiency, 1));
  DYNMO_TRY(check_field(device, "core_efficiency", device.core_efficiency, 1));
  DYNMO_TRY(check_field(device, "utilization", device.utilization, 1));
  return check_field(device, "bandwidth_efficiency", device.bandwidth_efficiency, 1);
}

const std::vector<Device>& devices() {
  static const std::vector<Device> kDevices = {h200(), h100(), a100(), cpu()};
  return kDevices;
}

Expected<Device> find_device(std::string_view name) {
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::vector<std::string> known;
  for (const Device& device : devices()) {
    if (device.name == lower) return device;
    known.push_back(device.name);
  }
  return make_error(ErrorCode::kBadInput, "device '{}' is not known{}", name,
                    suggestion(name, known));
}

}  // namespace dynmo::cost
