// SPDX-License-Identifier: Apache-2.0
#pragma once

// Analytic costs of transformer layers, for models without a profile. The model's shape gives the
// arithmetic and the bytes of each half block, and a device gives their time. The formulas and
// their sources are in docs/costs.md.

#include <cstdint>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/decoder_shape.h"
#include "dynmo/cost/device.h"
#include "dynmo/cost/half_block.h"
#include "dynmo/cost/layer_cost.h"

namespace dynmo::cost {

// A decoder, and its micro-batches.
struct TransformerShape : DecoderShape {
  std::int64_t head_size = 0;  // usually hidden / heads
  bool gated_mlp = false;      // three matrices (Llama, Mixtral) instead of two (GPT)
  bool tied_embedding = false;
  bool learned_positions = false;  // adds positions x hidden parameters to the embedding
  std::int64_t experts = 0;        // 0: a dense MLP
  std::int64_t experts_per_token = 0;
  bool norm_biases = false;  // LayerNorm (GPT) instead of RMSNorm
  bool qkv_biases = false;
  bool projection_biases = false;  // of attention's output
  bool mlp_biases = false;
  // Half blocks in order. If empty, the model has `blocks` pairs of attention and MLP (or experts)
  // that follow from the fields above. Else the fields above describe the first block of their
  // kind.
  std::vector<HalfBlock> halves;
  std::int64_t streams = 1;  // residual vectors of a token (hyper-connections)
  // Parameters of the head beside norm and matrix, which also multiply each token.
  double head_parameters = 0;
  std::vector<std::string> notes;  // parts that a plan omits or approximates

  std::int64_t micro_batch_size = 1;  // sequences
  bool fused_attention = true;        // false: the scores of all pairs are computed and kept
  bool dropout = false;               // keeps a mask of one byte for each element
  [[nodiscard]] std::int64_t tokens() const { return sequence * micro_batch_size; }
};

// Returns the shape with the sizes of with_defaults() and the other properties of the architecture.
// Layers are those of GPT or Llama. Mixtral has 8 experts, of which a token visits 2.
[[nodiscard]] TransformerShape transformer_shape(const DecoderShape& sizes,
                                                 Architecture architecture);

// Checks a shape. Returns the kBadInput of validate(DecoderShape), or kBadInput with the field.
// Head size and micro-batch must be at least 1. A token visits at most all experts. The sequence
// must not be longer than learned positions.
[[nodiscard]] Expected<void> validate(const TransformerShape& shape);

// One movable unit: embedding, attention, MLP or MoE, final norm + head with the loss. A sliced
// head is a chain. Each slice passes the normed values to the next. It adds two numbers a token:
// the logsumexp so far and the target's score. The first slice has the norm, the last one the loss.
// Amounts are those of the forward pass of one micro-batch. The backward passes follow from them
// (`layer_cost`).
struct LayerWork {
  std::string name;  // "embedding", "blocks.0.attention", "blocks.0.mlp" or ".moe", ..., "head"
                     // or "head.0 of 4", ...
  LayerKind kind = LayerKind::kMlp;
  double matrix_flops = 0;   // products with weights: once each in F, I and W
  double core_flops = 0;     // attention's scores and values: F once, `core_backward` times in I
  double core_backward = 2;  // 2.5 if the scores are computed again (fused); not in W
  // Bytes read and written by memory-bound kernels: norms, activation functions, residuals, the
  // loss. They count once in F and one and a half times in I. Those of the embedding count in W,
  // which is its whole backward pass.
  double moved_bytes = 0;
  double parameters = 0;          // counted once in the model
  double copied_parameters = 0;   // of another layer, also held here: the tied head's matrix
  double product_parameters = 0;  // weights that the products of one micro-batch read
  double activation_bytes = 0;    // stash of one micro-batch
  // Tokens x hidden elements. A slice of the head sends hidden + 2 float32 numbers a token, and
  // receives the same number. The last layer sends nothing.
  double boundary_bytes = 0;
};

// Returns the half blocks of a shape in order: `halves`, or those that follow from the other
// fields.
[[nodiscard]] std::vector<HalfBlock> half_blocks(const TransformerShape& shape);

// Returns embedding, half blocks and `head_slices` layers of the head, in order.
// `bytes_per_element` is for activations. Requires a valid shape.
[[nodiscard]] std::vector<LayerWork> transformer_work(const TransformerShape& shape,
                                                      double bytes_per_element = 2);

// Returns the cost of a layer. The time of a pass = max(products, reading their weights) +
// attention's core + moved bytes. Within a kernel arithmetic and memory overlap (the roofline
// model), and kernels run one after another. The optimizer's update is bound by memory. Requires a
// valid device.
[[nodiscard]] LayerCost layer_cost(const LayerWork& work, const Device& device);

// Returns the costs of all layers. Returns kBadInput if the device is not valid, or a cost exceeds
// the limits of a profile.
[[nodiscard]] Expected<ModelCost> layer_costs(const std::vector<LayerWork>& work,
                                              const Device& device);

// Returns the costs with all times divided by the device's utilization.
[[nodiscard]] ModelCost at_utilization(ModelCost model, const Device& device);

// Returns the costs of all layers of a shape on a device, at the speed of its kernels. Elements
// have the device's size. Returns kBadInput if shape or device is not valid, or a cost exceeds the
// limits of a profile.
[[nodiscard]] Expected<ModelCost> transformer_costs(const TransformerShape& shape,
                                                    const Device& device);

}  // namespace dynmo::cost
