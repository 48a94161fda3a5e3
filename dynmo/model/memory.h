// SPDX-License-Identifier: Apache-2.0
#pragma once

// How many bytes layers hold: computed for those of the families, measured for any layer.

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <memory>

#include "dynmo/core/ids.h"
#include "dynmo/core/units.h"
#include "dynmo/model/gpt2.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/llama.h"
#include "dynmo/model/precision.h"

namespace dynmo::model {

// fp32 values of a layer; its gradients take as much, its AdamW moments twice as much.
[[nodiscard]] Bytes parameter_bytes(const Layer& layer);

// The rounded copies of the same (Parameter::rounded): half as much in bf16, else 0.
[[nodiscard]] Bytes copy_bytes(const Layer& layer);

// Returns the bytes of a layer's buffers (Layer::buffers()), frozen or not.
[[nodiscard]] Bytes buffer_bytes(const Layer& layer);

// The hidden tensor between two layers of a micro-batch: sequences x tokens x hidden.
[[nodiscard]] Bytes boundary_bytes(const LlamaConfig& config, std::int64_t sequences,
                                   cost::Precision precision = cost::Precision::kFp32);
[[nodiscard]] Bytes boundary_bytes(const Gpt2Config& config, std::int64_t sequences,
                                   cost::Precision precision = cost::Precision::kFp32);

// Returns the bytes that the stash of one of make_llama's or make_gpt2's layers holds between
// forward and input_gradient, for a micro-batch of `sequences` x config.sequence tokens: exact.
// Includes the layer's input; not its parameters, and not tokens and targets, which belong to the
// batch. From then to weight_gradient gradients take the place of activations: about as much.
[[nodiscard]] Bytes activation_bytes(const LlamaConfig& config, LayerId layer,
                                     std::int64_t sequences,
                                     cost::Precision precision = cost::Precision::kFp32);
[[nodiscard]] Bytes activation_bytes(const Gpt2Config& config, LayerId layer,
                                     std::int64_t sequences,
                                     cost::Precision precision = cost::Precision::kFp32);

// The same for any layer, by running its forward once: bytes allocated and not freed, less the
// output's, plus the input's. In `peak`, the most that was allocated at once on the way.
struct StashBytes {
  Bytes held;
  Bytes peak;
};
[[nodiscard]] StashBytes measure_stash(const Layer& layer, const LayerState& state,
                                       const at::Tensor& input, const LayerContext& context);

// Counts what libtorch's allocator of one kind of device gives to and takes back from the thread
// that made it, while it lives. Not to be nested with libtorch's profiler, whose place it takes.
// Use on one thread.
class AllocationMeter {
 public:
  explicit AllocationMeter(c10::DeviceType device = c10::DeviceType::CPU);
  ~AllocationMeter();
  AllocationMeter(const AllocationMeter&) = delete;
  AllocationMeter& operator=(const AllocationMeter&) = delete;
  [[nodiscard]] Bytes held() const;  // allocated less freed since construction
  [[nodiscard]] Bytes peak() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dynmo::model
