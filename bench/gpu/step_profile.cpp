// SPDX-License-Identifier: Apache-2.0
// Where the time of one step goes on a device: one rank, libtorch's profiler, all micro-batches and
// the update. Prints one JSON line: seconds of the step without the profiler, and calls and
// milliseconds of each kernel of the device, or of each operator where no kernel is reported.
//
//     step_profile [HIDDEN BLOCKS HEADS INTERMEDIATE SEQUENCE VOCABULARY MICRO_BATCHES SEQUENCES
//                   DETERMINISTIC FUSED]
//
// DETERMINISTIC is 1, or 0 for run.deterministic = false; so is FUSED for run.fused_kernels.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "dynmo/c10d/cuda.h"
#include "dynmo/kernels/device/launcher.h"
#include "dynmo/model/adamw.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/llama.h"
#include "dynmo/model/precision.h"
#include "dynmo/runtime/device_clock.h"
#include "tests/support/tested_device.h"

namespace {

using namespace dynmo;         // NOLINT: a program
using namespace dynmo::model;  // NOLINT
namespace profiler = torch::autograd::profiler;

struct StepSize {
  std::int64_t micro_batches = 4;
  std::int64_t sequences = 4;  // of a micro-batch
};

// A whole model on one device, and its batches of drawn tokens.
class OneRank {
 public:
  OneRank(const LlamaConfig& config, const StepSize& size, at::Device device)
      : layers_(in_precision(make_llama(config), cost::Precision::kBf16)), device_(device) {
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      states_.push_back(
          on_device(make_state(*layers_[i], LayerId{static_cast<std::int32_t>(i)}, 1), device));
    }
    const auto draw = [&] {
      return at::randint(config.shape.vocabulary, {size.sequences, config.shape.sequence},
                         at::kLong)
          .to(device);
    };
    for (std::int64_t m = 0; m < size.micro_batches; ++m) {
      LayerContext context;
      context.tokens_BT = draw();
      context.targets_BT = draw();
      context.loss_weight = 1.0 / static_cast<double>(size.micro_batches);
      batches_.push_back(context);
    }
  }

  void step() {
    for (const LayerContext& batch : batches_) run(batch);
    for (LayerState& state : states_) update(state, {});
  }

  // Returns the seconds of `steps` steps.
  double timed(int steps) {
    runtime::DeviceClock clock(device_);
    clock.finish();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) step();
    clock.finish();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  void run(const LayerContext& batch) {
    std::vector<std::unique_ptr<Stash>> stashes(layers_.size());
    Hidden hidden;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      hidden = layers_[i]->forward(states_[i], hidden, batch, &stashes[i]).hidden;
    }
    at::Tensor gradient;
    for (std::size_t i = layers_.size(); i-- > 0;) {
      gradient = layers_[i]->input_gradient(
          states_[i], *stashes[i], gradient,
          i > 0 ? Layer::InputGradient::kWanted : Layer::InputGradient::kNotWanted);
      layers_[i]->weight_gradient(states_[i], *stashes[i]);
    }
  }

  Model layers_;
  at::Device device_;
  std::vector<LayerState> states_;
  std::vector<LayerContext> batches_;
};

struct KernelTime {
  std::int64_t calls = 0;
  double ms = 0;
};

std::map<std::string, KernelTime> profiled_step(OneRank& rank, at::Device device) {
  using torch::profiler::impl::ActivityType;
  std::set<ActivityType> activities{ActivityType::CPU};
  if (device.is_cuda()) activities.insert(ActivityType::CUDA);
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  rank.step();
  runtime::DeviceClock(device).finish();
  const auto result = profiler::disableProfiler();
  std::map<std::string, KernelTime> kernels;
  const auto wanted = device.is_cuda() ? at::kCUDA : at::kCPU;
  for (const profiler::KinetoEvent& event : result->events()) {
    if (event.deviceType() != wanted) continue;
    KernelTime& kernel = kernels[event.name()];
    ++kernel.calls;
    kernel.ms += static_cast<double>(event.durationNs()) / 1e6;
  }
  return kernels;
}

int print_profile(const std::array<std::int64_t, 10>& sizes) {
  const auto determinism =
      sizes[8] != 0 ? c10d::Determinism::kDemanded : c10d::Determinism::kNotDemanded;
  at::Device device = dynmo::testing::tested_device();
  if (device.is_cpu()) {
    const auto opened = c10d::open_cuda(0, determinism);
    if (!opened) {
      fmt::print(stderr, "step_profile: {}\n", opened.error().message);
      return 2;
    }
    device = *opened;
  }
  c10d::set_determinism(determinism);
  kernels::device::use_kernels(sizes[9] != 0);
  LlamaConfig config;
  config.shape.hidden = sizes[0];
  config.shape.blocks = static_cast<int>(sizes[1]);
  config.shape.heads = config.shape.kv_heads = sizes[2];
  config.shape.intermediate = sizes[3];
  config.shape.sequence = sizes[4];
  config.shape.vocabulary = sizes[5];
  OneRank rank(config, {.micro_batches = sizes[6], .sequences = sizes[7]}, device);
  rank.timed(3);
  constexpr int kSteps = 5;
  const double seconds = rank.timed(kSteps) / kSteps;
  nlohmann::ordered_json out = {{"step_s", seconds}, {"kernels", nlohmann::ordered_json::array()}};
  for (const auto& [name, kernel] : profiled_step(rank, device)) {
    out["kernels"].push_back({{"name", name}, {"calls", kernel.calls}, {"ms", kernel.ms}});
  }
  fmt::print("{}\n", out.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::array<std::int64_t, 10> sizes{2048, 8, 16, 5504, 2048, 32000, 4, 4, 1, 1};
  for (std::size_t i = 0; i < sizes.size() && static_cast<int>(i) + 1 < argc; ++i) {
    sizes[i] = std::atoll(argv[i + 1]);
  }
  return print_profile(sizes);
}
