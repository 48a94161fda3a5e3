// SPDX-License-Identifier: Apache-2.0
#pragma once

// How many bytes the stash of a layer holds between forward and input_gradient, for a micro-batch
// of `sequences` x config.sequence tokens: by formula, exact, for the layers of the families, and
// measured for any layer. The layer's input counts; its parameters, tokens and targets do not.

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>

#include "dynmo/core/ids.h"
#include "dynmo/core/units.h"
#include "dynmo/model/gpt2.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/llama.h"
#include "dynmo/model/memory.h"
#include "dynmo/model/precision.h"
#include "dynmo/model/recipe.h"

namespace dynmo::model {

inline constexpr std::int64_t kFp32Bytes = 4;

inline std::int64_t element_bytes(cost::Precision precision) {
  return static_cast<std::int64_t>(c10::elementSize(scalar_type(precision)));
}

// The hidden tensor between two layers of a micro-batch: sequences x tokens x hidden.
inline Bytes boundary_bytes(const LlamaConfig& config, std::int64_t sequences,
                            cost::Precision precision = cost::Precision::kFp32) {
  return Bytes{element_bytes(precision) * sequences * config.shape.sequence * config.shape.hidden};
}

// Dimensions as in operations.h. Per token, with D and V = kv_heads x head_size:
//   attention: x, rotated q, output (3 D), rotated k, v (2 V), 1 / rms, log-sum-exp (heads)
//   mlp: x (D), gate, up (2 F), 1 / rms
//   head: x (D), probabilities, 1 / rms
// and one byte of dropout mask for each output of a half block. In bf16 all take half as much but
// 1 / rms, log-sum-exp and probabilities, which stay fp32. What weight gradients need beside
// it (the normed input, the product of gate and up) is computed again.
inline Bytes activation_bytes(const LlamaConfig& config, LayerId layer, std::int64_t sequences,
                              cost::Precision precision = cost::Precision::kFp32) {
  const Part part = decoder_place(layer, config.shape.blocks).part;
  const std::int64_t tokens = sequences * config.shape.sequence;
  const std::int64_t element = element_bytes(precision);
  const std::int64_t mask = config.dropout > 0 ? config.shape.hidden : 0;
  if (part == Part::kEmbedding) return Bytes{0};
  if (part == Part::kHead) {
    return Bytes{tokens *
                 (element * config.shape.hidden + kFp32Bytes * (config.shape.vocabulary + 1))};
  }
  if (part == Part::kAttention) {
    const std::int64_t kv = config.shape.kv_heads * config.head_size();
    return Bytes{tokens * (element * (3 * config.shape.hidden + 2 * kv) +
                           kFp32Bytes * (1 + config.shape.heads) + mask)};
  }
  return Bytes{tokens * (element * (config.shape.hidden + 2 * config.shape.intermediate) +
                         kFp32Bytes + mask)};
}

inline Bytes boundary_bytes(const Gpt2Config& config, std::int64_t sequences,
                            cost::Precision precision = cost::Precision::kFp32) {
  return Bytes{element_bytes(precision) * sequences * config.shape.sequence * config.shape.hidden};
}

// Per token, with D and F as in operations.h:
//   embedding: a mask where dropout acts
//   attention: x, query, key, value, output (5 D), mean, 1 / std, log-sum-exp (heads)
//   mlp: x (D), input of gelu (F), mean, 1 / std
//   head: x (D), probabilities, mean, 1 / std
// and a mask as above. In bf16 all take half as much but the statistics (mean, 1 / std,
// log-sum-exp) and probabilities, which stay fp32.
inline Bytes activation_bytes(const Gpt2Config& config, LayerId layer, std::int64_t sequences,
                              cost::Precision precision = cost::Precision::kFp32) {
  const Part part = decoder_place(layer, config.shape.blocks).part;
  const std::int64_t tokens = sequences * config.shape.sequence;
  const std::int64_t mask = config.dropout > 0 ? config.shape.hidden : 0;
  const std::int64_t element = element_bytes(precision);
  const std::int64_t normed =
      element * config.shape.hidden + kFp32Bytes * 2;  // what every norm keeps
  if (part == Part::kEmbedding) return Bytes{tokens * mask};
  if (part == Part::kHead) return Bytes{tokens * (normed + kFp32Bytes * config.shape.vocabulary)};
  const std::int64_t own = part == Part::kAttention
                               ? element * 4 * config.shape.hidden + kFp32Bytes * config.shape.heads
                               : element * config.shape.intermediate;
  return Bytes{tokens * (normed + own + mask)};
}

// `held` is what the layer's forward allocates and does not free, less its output, plus its input;
// `peak` the most that was allocated at once on the way.
struct StashBytes {
  Bytes held;
  Bytes peak;
};
inline StashBytes measure_stash(const Layer& layer, const LayerState& state,
                                const at::Tensor& input, const LayerContext& context) {
  std::unique_ptr<Stash> stash;
  StashBytes bytes;
  {
    const AllocationMeter meter(
        state.parameters.empty() ? at::kCPU : state.parameters.front().value.device().type());
    const Output output = layer.forward(state, input, context, &stash);
    const auto size = [](const at::Tensor& t) {
      return Bytes{t.defined() ? static_cast<std::int64_t>(t.nbytes()) : 0};
    };
    bytes.held = meter.held() - size(output.hidden.x) - size(output.loss) + size(input);
    bytes.peak = meter.peak();
  }
  return bytes;
}

}  // namespace dynmo::model
