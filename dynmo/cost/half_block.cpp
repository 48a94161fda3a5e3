// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/half_block.h"

namespace dynmo::cost {
namespace {

// Returns a half block with its norms. Its stash has the inputs of the first norm and of the first
// product.
HalfBlock with_norms(LayerKind kind, std::string name, const BlockNorms& norms) {
  const double weights = norms.hidden * (norms.biases ? 2 : 1);
  HalfBlock half;
  half.kind = kind;
  half.name = std::move(name);
  half.parameters = weights;
  half.kept = 2 * norms.hidden;
  if (norms.behind) half.norm(norms.hidden, weights);
  return half;
}

// Returns the number of tensors of the MLP's width that it keeps and moves: inputs and output of
// the activation function. A gated one has two inputs.
double mlp_tensors(bool gated) { return gated ? 3 : 2; }

void add_mlp(HalfBlock& half, double hidden, double width, bool gated, bool biases) {
  if (gated) half.multiply(hidden, width, biases);
  half.multiply(hidden, width, biases);
  half.multiply(width, hidden, biases);
  half.kept += mlp_tensors(gated) * width;
  half.moved += mlp_tensors(gated) * width;
}

// Adds an indexer's scores of all earlier tokens, by which attention chooses some of them.
void add_index_core(HalfBlock& half, double heads, double size) {
  half.kept += (heads + 1) * size;
  half.cores.push_back({.heads = heads, .query_size = size});
}

}  // namespace

void HalfBlock::multiply(double in, double out, bool bias) {
  matrices += in * out;
  parameters += in * out + (bias ? out : 0);
}

void HalfBlock::norm(double width, double weights) {
  parameters += weights;
  kept += width;
  moved += 2 * width;
}

HalfBlock attention_half(const AttentionShape& shape) {
  const double hidden = shape.norms.hidden;
  const double queries = shape.heads * shape.head_size;
  const double keys = shape.kv_heads * shape.head_size;
  const double values = shape.kv_heads * shape.value_size;
  const double outputs = shape.heads * shape.value_size;
  HalfBlock half = with_norms(LayerKind::kAttention, "attention", shape.norms);
  half.multiply(hidden, queries, shape.qkv_biases);
  half.multiply(hidden, keys, shape.qkv_biases);
  if (!shape.key_is_value) half.multiply(hidden, values, shape.qkv_biases);
  half.multiply(outputs, hidden, shape.output_bias);
  half.kept += queries + keys + values + outputs;
  if (shape.rotary) half.moved += 2 * (queries + keys);
  if (shape.norm == QueryKeyNorm::kHead) half.norm(queries + keys, 2 * shape.head_size);
  if (shape.norm == QueryKeyNorm::kWide) half.norm(queries + keys, queries + keys);
  if (shape.gate != OutputGate::kNone) {
    const double gates = shape.gate == OutputGate::kHead ? shape.heads : outputs;
    half.multiply(hidden, gates, shape.gate == OutputGate::kElement && shape.qkv_biases);
    half.kept += gates + outputs;
    half.moved += gates + 2 * outputs;
  }
  if (shape.sinks) half.parameters += shape.heads;
  if (shape.indexer != Indexer::kNone) {
    half.multiply(hidden, shape.index_heads * shape.index_size);
    half.multiply(hidden, shape.index_size);
    half.norm((shape.index_heads + 1) * shape.index_size, 2 * shape.index_size);
    add_index_core(half, shape.index_heads, shape.index_size);
  }
  half.cores.push_back({.heads = shape.heads,
                        .query_size = shape.head_size,
                        .value_size = shape.value_size,
                        .window = shape.window});
  return half;
}

HalfBlock latent_attention_half(const LatentAttentionShape& shape) {
  const double hidden = shape.norms.hidden;
  const double head = shape.plain_size + shape.rotary_size;
  const double queries = shape.heads * head;
  const double values = shape.heads * shape.value_size;
  HalfBlock half = with_norms(LayerKind::kAttention, "attention", shape.norms);
  if (shape.query_rank > 0) {
    half.multiply(hidden, shape.query_rank, shape.biases);
    half.norm(shape.query_rank, shape.query_rank);
    half.kept += shape.query_rank;
    half.multiply(shape.query_rank, queries);
  } else {
    half.multiply(hidden, queries);
  }
  half.multiply(hidden, shape.latent_rank + shape.rotary_size, shape.biases);
  half.norm(shape.latent_rank, shape.latent_rank);
  half.kept += shape.latent_rank;
  half.multiply(shape.latent_rank, shape.heads * (shape.plain_size + shape.value_size));
  half.multiply(values, hidden, shape.biases);
  half.kept += 2 * queries + 2 * values;
  half.moved += 2 * (shape.heads + 1) * shape.rotary_size + 2 * queries;  // keys are put together
  if (shape.indexer != Indexer::kNone) {
    const double source = shape.query_rank > 0 ? shape.query_rank : hidden;
    half.multiply(source, shape.index_heads * shape.index_size);
    half.multiply(hidden, shape.index_size);
    half.norm(shape.index_size, 2 * shape.index_size);
    half.multiply(hidden, shape.index_heads);
    add_index_core(half, shape.index_heads, shape.index_size);
  }
  half.cores.push_back({.heads = shape.heads,
                        .query_size = head,
                        .value_size = shape.value_size,
                        .window = shape.window});
  return half;
}

HalfBlock compressed_attention_half(const CompressedAttentionShape& shape) {
  const double hidden = shape.norms.hidden;
  const double head = shape.head_size;
  const double queries = shape.heads * head;
  const double outputs = shape.groups * shape.output_rank;
  HalfBlock half = with_norms(LayerKind::kAttention, "attention", shape.norms);
  half.multiply(hidden, shape.query_rank);
  half.norm(shape.query_rank, shape.query_rank);
  half.multiply(shape.query_rank, queries);
  half.multiply(hidden, head);
  half.norm(head, head);
  half.multiply(queries / shape.groups, outputs);  // a group has its share of the heads
  half.multiply(outputs, hidden);
  half.parameters += shape.heads;  // a learned score a head
  half.kept += shape.query_rank + head + 3 * queries + outputs;
  half.moved += 4 * queries;
  const bool indexed = shape.indexer != Indexer::kNone;
  const double halves = indexed ? 2 : 1;  // overlapping windows have two vectors a token
  if (shape.compression > 0) {
    half.multiply(hidden, halves * head);
    half.multiply(hidden, halves * head);
    half.parameters += shape.compression * halves * head;  // biases by position
    half.norm(head / shape.compression, head);
    half.kept += 2 * halves * head;
  }
  if (indexed) {
    half.multiply(hidden, 2 * shape.index_size);
    half.multiply(hidden, 2 * shape.index_size);
    half.parameters += shape.compression * 2 * shape.index_size;
    half.norm(shape.index_size / shape.compression, shape.index_size);
    half.multiply(shape.query_rank, shape.index_heads * shape.index_size);
    half.multiply(hidden, shape.index_heads);
    // One score for `compression` tokens.
    add_index_core(half, shape.index_heads / shape.compression, shape.index_size);
  }
  half.cores.push_back(
      {.heads = shape.heads, .query_size = head, .value_size = head, .window = shape.window});
  return half;
}

HalfBlock delta_half(const DeltaShape& shape) {
  constexpr double kChunk = 64;
  const double hidden = shape.norms.hidden;
  const double keys = shape.key_heads * shape.key_size;
  const double values = shape.value_heads * shape.value_size;
  const double channels = 2 * keys + values;
  HalfBlock half = with_norms(LayerKind::kAttention, "linear_attention", shape.norms);
  half.multiply(hidden, channels);
  half.multiply(hidden, values);                 // the output's gate
  half.multiply(hidden, 2 * shape.value_heads);  // decay and strength of a write
  half.multiply(values, hidden);
  half.parameters += channels * shape.kernel + 2 * shape.value_heads;
  half.norm(values, shape.value_size);
  half.kept += 2 * channels + 2 * values + 2 * shape.value_heads;
  half.moved += 2 * channels + 3 * values;
  // A chunk computes K K^T, Q K^T, a triangular inverse, and its products with values and keys. The
  // state is read twice, for outputs and for the values that it replaces, and written once.
  half.scan_flops =
      2 * channels * shape.kernel +
      shape.value_heads * (2 * kChunk * (3 * shape.key_size + 2 * shape.value_size + kChunk / 3) +
                           6 * shape.key_size * shape.value_size);
  return half;
}

HalfBlock state_space_half(const StateSpaceShape& shape) {
  const double hidden = shape.norms.hidden;
  const double inner = shape.heads * shape.head_size;
  const double channels = inner + 2 * shape.groups * shape.state;
  HalfBlock half = with_norms(LayerKind::kAttention, "mamba", shape.norms);
  half.multiply(hidden, inner + channels + shape.heads, shape.biases);
  half.multiply(inner, hidden, shape.biases);
  half.parameters += channels * (shape.kernel + (shape.kernel_bias ? 1 : 0)) + 3 * shape.heads;
  half.norm(inner, inner);
  half.kept += 2 * channels + 2 * inner + shape.heads;
  half.moved += 2 * channels + 3 * inner;
  // A chunk computes C B^T and its product with x, both for the causal half. The state is written
  // and read.
  half.scan_flops = 2 * channels * shape.kernel +
                    shape.chunk * (shape.groups * shape.state + inner) + 4 * inner * shape.state;
  return half;
}

HalfBlock mlp_half(const MlpShape& shape) {
  HalfBlock half = with_norms(LayerKind::kMlp, "mlp", shape.norms);
  add_mlp(half, shape.norms.hidden, shape.width, shape.gated, shape.biases);
  return half;
}

// Returns the half block of a mixture of experts that drops no token. Rows are copied to their
// experts, and the outputs back. Each expert's output is kept for the gradient of its gate.
HalfBlock moe_half(const MoeShape& shape) {
  constexpr double kFloat = 4;  // bytes: gates are float32
  constexpr double kIndex = 8;
  const double hidden = shape.norms.hidden;
  const double row = shape.latent > 0 ? shape.latent : hidden;
  const double matrices = mlp_tensors(shape.gated);
  const double inner = mlp_tensors(shape.gated) * shape.width;
  HalfBlock half = with_norms(LayerKind::kMoe, "moe", shape.norms);
  half.multiply(hidden, shape.experts, shape.router_bias);
  half.experts = shape.experts;
  half.chosen = shape.chosen;
  half.expert = matrices * row * shape.width;
  const double biases = shape.expert_biases ? (matrices - 1) * shape.width + row : 0;
  half.parameters += shape.experts * (half.expert + biases);
  half.kept += shape.chosen * (2 * row + inner);
  half.kept_bytes = kFloat * shape.experts + (kFloat + kIndex) * shape.chosen;
  half.moved += shape.chosen * (inner + 4 * row);
  if (shape.latent > 0) {
    half.multiply(hidden, row, shape.common_biases);
    half.multiply(row, hidden, shape.common_biases);
    half.kept += 2 * row;
  }
  if (shape.shared_width > 0) {
    add_mlp(half, hidden, shape.shared_width, shape.gated, shape.common_biases);
  }
  if (shape.shared_gate) {
    half.multiply(hidden, 1);
    half.kept += hidden;
    half.moved += 3 * hidden;
  }
  if (shape.scaled_router) {
    half.parameters += hidden + shape.experts;
    for (int norm = 0; norm < 3; ++norm) half.norm(hidden, hidden);
  }
  return half;
}

void add_streams(HalfBlock& half, double hidden, double streams) {
  const double outputs = (2 + streams) * streams;  // factors of reading, writing and mixing
  half.multiply(streams * hidden, outputs);
  half.parameters += outputs + 3;
  half.kept += 2 * streams * hidden;
  half.moved += 4 * streams * hidden;
}

}  // namespace dynmo::cost
