// SPDX-License-Identifier: Apache-2.0
#pragma once

// Analytic costs of transformer layers, for models nobody has profiled yet: the arithmetic and the
// bytes of each half block from the model's shape, and the time they take on a device.
// docs/costs.md has the formulas with their sources.

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

// A decoder, and how micro-batches go through it.
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
  // Half blocks in order, where they are not `blocks` pairs of attention and MLP (or experts) that
  // follow from the fields above; those then are of the first of their kind.
  std::vector<HalfBlock> halves;
  std::int64_t streams = 1;        // residual vectors of a token (hyper-connections)
  double head_parameters = 0;      // of the head, beside norm and matrix; each token's products too
  std::vector<std::string> notes;  // what a plan leaves out or takes for something else

  std::int64_t micro_batch_size = 1;  // sequences
  bool fused_attention = true;        // false: the scores of all pairs are computed and kept
  bool dropout = false;               // keeps a mask of one byte an element where dropout acts
  [[nodiscard]] std::int64_t tokens() const { return sequence * micro_batch_size; }
};

// `with_defaults` of the sizes, and what else the architecture is: the layers of GPT or Llama, in
// Mixtral 8 experts, 2 a token.
[[nodiscard]] TransformerShape transformer_shape(const DecoderShape& sizes,
                                                 Architecture architecture);

// kBadInput as for the sizes, or naming the field: a head size or micro-batch below 1, more experts
// a token than experts, a sequence longer than the learned positions.
[[nodiscard]] Expected<void> validate(const TransformerShape& shape);

// One movable unit: embedding, attention, MLP or MoE, final norm + head with the loss. A sliced
// head is a chain: each slice passes the normed values on, with two numbers a token (the logsumexp
// so far and the target's score), the first has the norm, and the last one the loss. Amounts are
// of the forward pass of one micro-batch; the backward passes follow from them (`layer_cost`).
struct LayerWork {
  std::string name;  // "embedding", "blocks.0.attention", "blocks.0.mlp" or ".moe", ..., "head"
                     // or "head.0 of 4", ...
  LayerKind kind = LayerKind::kMlp;
  double matrix_flops = 0;   // products with weights: once each in F, I and W
  double core_flops = 0;     // attention's scores and values: F once, `core_backward` times in I
  double core_backward = 2;  // 2.5 if the scores are computed again (fused); not in W
  // Read and written by what is bound by memory (norms, activation functions, residuals, the loss):
  // once in F, one and a half times in I; of the embedding's in W, which is its whole backward.
  double moved_bytes = 0;
  double parameters = 0;          // counted once in the model
  double copied_parameters = 0;   // of another layer, held here too: the tied head's matrix
  double product_parameters = 0;  // weights that the products of one micro-batch read
  double activation_bytes = 0;    // stash of one micro-batch
  // Tokens x hidden elements. A slice of the head sends hidden + 2 float32 numbers a token, and
  // gets as many back. The last layer sends nothing.
  double boundary_bytes = 0;
};

// The half blocks of a shape in order: its own, or those that follow from its fields.
[[nodiscard]] std::vector<HalfBlock> half_blocks(const TransformerShape& shape);

// Embedding, half blocks, `head_slices` layers of the head, in order. Requires a valid shape;
// `bytes_per_element` of the activations.
[[nodiscard]] std::vector<LayerWork> transformer_work(const TransformerShape& shape,
                                                      double bytes_per_element = 2);

// Time of a pass = max(products, reading their weights) + attention's core + moved bytes: within a
// kernel arithmetic and memory overlap (the roofline model), kernels run one after another. The
// optimizer's update is bound by memory. Requires a valid device.
[[nodiscard]] LayerCost layer_cost(const LayerWork& work, const Device& device);

// The costs of all layers. kBadInput if the device is not valid, or a cost is beyond what a profile
// may hold.
[[nodiscard]] Expected<ModelCost> layer_costs(const std::vector<LayerWork>& work,
                                              const Device& device);

// The same costs at a device's utilization: all times are longer by 1 / utilization.
[[nodiscard]] ModelCost at_utilization(ModelCost model, const Device& device);

// All layers of a shape on a device, at the speed of its kernels; elements have the device's size.
// kBadInput if shape or device is not valid, or a layer's cost is beyond what a profile may hold.
[[nodiscard]] Expected<ModelCost> transformer_costs(const TransformerShape& shape,
                                                    const Device& device);

}  // namespace dynmo::cost
