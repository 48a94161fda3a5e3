// SPDX-License-Identifier: Apache-2.0
#pragma once

// Analytic costs of transformer layers, for models nobody has profiled yet: the arithmetic and the
// bytes of each half block from the model's shape, and the time they take on a device.

#include <cstdint>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/layer_cost.h"

namespace dynmo::cost {

struct TransformerShape {
  int blocks = 0;
  std::int64_t hidden = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_size = 0;  // usually hidden / heads
  std::int64_t intermediate = 0;
  bool gated_mlp = false;  // three matrices (Llama, Mixtral) instead of two (GPT)
  std::int64_t vocabulary = 0;
  bool tied_embedding = false;
  bool learned_positions = false;  // adds positions x hidden parameters to the embedding
  std::int64_t positions = 0;
  std::int64_t experts = 0;  // 0: a dense MLP
  std::int64_t experts_per_token = 0;

  std::int64_t sequence = 0;
  std::int64_t micro_batch_size = 1;  // sequences
  [[nodiscard]] std::int64_t tokens() const { return sequence * micro_batch_size; }
};

enum class LayerKind { kEmbedding, kAttention, kMlp, kMoe, kHead };

// One movable unit: embedding, attention, MLP or MoE, final norm + head. All amounts are of the
// forward pass of one micro-batch; the backward passes follow from them (layer_cost below).
struct LayerWork {
  std::string name;  // "embedding", "block0.attention", "block0.mlp", ..., "head"
  LayerKind kind = LayerKind::kMlp;
  double matrix_flops = 0;  // products with weights: once each in F, I and W
  double core_flops = 0;    // attention's scores and values (causal half): F once, I twice, W none
  double moved_bytes = 0;   // read and written by what is bound by memory: once each in F and I
  double parameters = 0;
  double activation_bytes = 0;  // stash of one micro-batch
  double boundary_bytes = 0;
};

struct Device {
  std::string name;
  double flops_per_s = 0;            // peak, dense, of the training precision
  double bandwidth_bytes_per_s = 0;  // of its memory
  double matrix_efficiency = 1;      // share of the peak that large products reach
  double core_efficiency = 1;        // share of the peak that attention's core reaches
  Bytes memory;
  double bytes_per_parameter = 2;  // weights as the products read them
  double bytes_per_gradient = 2;
  double bytes_per_optimizer = 12;  // master copy and moments, a parameter
};

[[nodiscard]] std::vector<LayerWork> transformer_work(const TransformerShape& shape);
[[nodiscard]] LayerCost layer_cost(const LayerWork& work, const Device& device);
// All layers of a shape on a device.
[[nodiscard]] Expected<ModelCost> transformer_costs(const TransformerShape& shape,
                                                    const Device& device);

}  // namespace dynmo::cost
