// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/transformer.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::cost {
namespace {

constexpr std::int64_t kMaxSize = std::int64_t{1} << 30;
constexpr double kCausal = 0.5;  // share of the score matrix below the diagonal
constexpr double kFloat = 4;     // losses, routers and log-sum-exps are kept in float32

// The shape as doubles, because products of large sizes would overflow integers.
struct Sizes {
  Sizes(const TransformerShape& shape, double bytes_per_element)
      : tokens(static_cast<double>(shape.tokens())),
        sequence(static_cast<double>(shape.sequence)),
        hidden(static_cast<double>(shape.hidden)),
        vocabulary(static_cast<double>(shape.vocabulary)),
        streams(static_cast<double>(shape.streams)),
        element(bytes_per_element),
        mask(shape.dropout ? 1.0 : 0.0) {}

  double tokens, sequence, hidden, vocabulary, streams;
  double element;  // bytes
  double mask;     // bytes an element of a dropout mask

  [[nodiscard]] double hidden_bytes() const { return tokens * hidden * element; }
  // Returns the bytes moved by a norm (read, write) and the residual sum (two read, one written)
  // with its dropout mask.
  [[nodiscard]] double norm_and_residual() const {
    return 5 * hidden_bytes() + mask * tokens * hidden;
  }
};

double norm_parameters(const TransformerShape& shape) {
  return static_cast<double>(shape.hidden) * (shape.norm_biases ? 2 : 1);
}

LayerWork embedding(const TransformerShape& shape, const Sizes& n) {
  LayerWork work;
  work.name = "embedding";
  work.kind = LayerKind::kEmbedding;
  work.moved_bytes = 2 * n.hidden_bytes();
  work.parameters = n.vocabulary * n.hidden;
  if (shape.learned_positions) work.parameters += static_cast<double>(shape.positions) * n.hidden;
  work.activation_bytes = n.tokens * (8 + n.mask * n.hidden);  // 64-bit token ids
  work.boundary_bytes = n.streams * n.hidden_bytes();
  return work;
}

// Returns the mean number of tokens that a token attends to: itself and earlier ones, at most the
// window.
double mean_keys(const AttentionCore& core, const Sizes& n) {
  if (core.window <= 0 || core.window >= n.sequence) return kCausal * n.sequence;
  return core.window * (1 - kCausal * core.window / n.sequence);
}

// Adds the scores and their stash. Fused attention keeps log-sum-exps (4 bytes a head and token),
// otherwise the matrix of probabilities is kept. Dropout adds its mask and the masked matrix.
void add_core(const AttentionCore& core, const TransformerShape& shape, const Sizes& n,
              LayerWork& work) {
  const double widths = core.heads * (core.query_size + core.value_size);
  const double pairs = core.heads * n.tokens * n.sequence;
  if (shape.fused_attention) {
    work.core_flops += 2 * n.tokens * mean_keys(core, n) * widths;
    work.core_backward = 2.5;
    if (core.value_size > 0) work.activation_bytes += kFloat * core.heads * n.tokens;
  } else {
    work.core_flops += 2 * n.tokens * n.sequence * widths;
    work.core_backward = 2;
    work.moved_bytes += 4 * pairs * n.element;
    work.activation_bytes += pairs * (n.element + n.mask * (n.element + 1));
  }
}

// Returns the work of a half block, with all experts on one device.
LayerWork work_of(const HalfBlock& half, const TransformerShape& shape, const Sizes& n) {
  LayerWork work;
  work.name = fmt::format("blocks.{}.{}", half.block, half.name);
  work.kind = half.kind;
  // At most the experts that some token visits.
  work.product_parameters =
      half.matrices + half.expert * std::min(half.experts, n.tokens * half.chosen);
  work.matrix_flops = 2 * n.tokens * (half.matrices + half.chosen * half.expert);
  work.core_flops = n.tokens * half.scan_flops;
  work.moved_bytes = n.norm_and_residual() + n.tokens * half.moved * n.element;
  work.parameters = half.parameters;
  work.activation_bytes = n.tokens * (half.kept * n.element + half.kept_bytes + n.mask * n.hidden);
  work.boundary_bytes = n.streams * n.hidden_bytes();
  for (const AttentionCore& core : half.cores) add_core(core, shape, n, work);
  return work;
}

// Returns the work of a slice of the head. Logits are kept as the product writes them, and as
// float32 probabilities for the loss. Every slice reads the normed values and adds to their
// gradient.
LayerWork head(const TransformerShape& shape, const Sizes& n, std::int64_t slice) {
  constexpr double kCarried = 2 * kFloat;  // bytes a token
  const HeadRows rows = head_rows(shape.vocabulary, shape.head_slices, slice);
  const auto words = static_cast<double>(rows.end - rows.begin);
  const double logits = n.tokens * words * (n.element + kFloat);
  const double inputs = (slice == 0 ? 2 : 1) * n.hidden_bytes();  // of the norm and of the product
  LayerWork work;
  work.name =
      shape.head_slices == 1 ? "head" : fmt::format("head.{} of {}", slice, shape.head_slices);
  work.kind = LayerKind::kHead;
  work.product_parameters = n.hidden * words;
  const double extra = slice == 0 ? shape.head_parameters : 0;
  work.matrix_flops = 2 * n.tokens * (work.product_parameters + extra);
  work.moved_bytes = inputs + logits;
  work.parameters = slice == 0 ? norm_parameters(shape) + extra : 0;
  (shape.tied_embedding ? work.copied_parameters : work.parameters) += work.product_parameters;
  work.activation_bytes = inputs + logits + (slice == 0 ? 0 : kCarried * n.tokens);
  if (slice + 1 < shape.head_slices) {
    work.boundary_bytes = n.tokens * (n.hidden * kFloat + kCarried);
  }
  return work;
}

Bytes to_bytes(double bytes) {
  return Bytes{static_cast<std::int64_t>(std::min(std::ceil(bytes), 0x1p62))};
}

}  // namespace

TransformerShape transformer_shape(const DecoderShape& sizes, Architecture architecture) {
  TransformerShape shape;
  static_cast<DecoderShape&>(shape) = with_defaults(sizes, architecture);
  const bool gpt = architecture == Architecture::kGpt;
  shape.head_size = shape.heads < 1 ? 0 : std::max<std::int64_t>(1, shape.hidden / shape.heads);
  shape.gated_mlp = !gpt;
  shape.learned_positions = gpt;
  shape.norm_biases = shape.qkv_biases = shape.projection_biases = shape.mlp_biases = gpt;
  if (architecture == Architecture::kMixtral) {
    shape.experts = 8;
    shape.experts_per_token = 2;
  }
  return shape;
}

Expected<void> validate(const TransformerShape& shape) {
  DYNMO_TRY(validate(static_cast<const DecoderShape&>(shape)));
  for (const auto& [key, value] :
       {std::pair<std::string_view, std::int64_t>{"head_size", shape.head_size},
        {"micro_batch_size", shape.micro_batch_size}}) {
    if (value >= 1 && value <= kMaxSize) continue;
    return make_error(ErrorCode::kBadInput, "model.{} is {}, wanted 1 to {}", key, value, kMaxSize);
  }
  if (shape.experts < 0 || shape.experts > kMaxSize) {
    return make_error(ErrorCode::kBadInput, "model.experts is {}, wanted 0 (dense) to {}",
                      shape.experts, kMaxSize);
  }
  if (shape.experts > 0 &&
      (shape.experts_per_token < 1 || shape.experts_per_token > shape.experts)) {
    return make_error(ErrorCode::kBadInput,
                      "model.experts_per_token is {}, wanted 1 to model.experts ({})",
                      shape.experts_per_token, shape.experts);
  }
  if (shape.learned_positions && shape.positions < shape.sequence) {
    return make_error(ErrorCode::kBadInput,
                      "model.positions is {}, wanted at least model.sequence ({})", shape.positions,
                      shape.sequence);
  }
  return {};
}

std::vector<HalfBlock> half_blocks(const TransformerShape& shape) {
  if (!shape.halves.empty()) return shape.halves;
  const auto number = [](std::int64_t value) { return static_cast<double>(value); };
  const BlockNorms norms = {.hidden = number(shape.hidden), .biases = shape.norm_biases};
  HalfBlock first = attention_half({.norms = norms,
                                    .heads = number(shape.heads),
                                    .kv_heads = number(shape.kv_heads),
                                    .head_size = number(shape.head_size),
                                    .value_size = number(shape.head_size),
                                    .rotary = !shape.learned_positions,
                                    .qkv_biases = shape.qkv_biases,
                                    .output_bias = shape.projection_biases});
  HalfBlock second = shape.experts > 0 ? moe_half({.norms = norms,
                                                   .experts = number(shape.experts),
                                                   .chosen = number(shape.experts_per_token),
                                                   .width = number(shape.intermediate),
                                                   .gated = shape.gated_mlp,
                                                   .expert_biases = shape.mlp_biases})
                                       : mlp_half({.norms = norms,
                                                   .width = number(shape.intermediate),
                                                   .gated = shape.gated_mlp,
                                                   .biases = shape.mlp_biases});
  std::vector<HalfBlock> halves;
  for (int block = 0; block < shape.blocks; ++block) {
    first.block = second.block = block;
    halves.push_back(first);
    halves.push_back(second);
  }
  return halves;
}

std::vector<LayerWork> transformer_work(const TransformerShape& shape, double bytes_per_element) {
  const auto valid = validate(shape);
  DYNMO_CHECK(valid.has_value(), "a valid shape: {}", valid.error().message);
  DYNMO_CHECK(bytes_per_element > 0, "elements of more than 0 bytes, got {}", bytes_per_element);
  const Sizes n(shape, bytes_per_element);
  std::vector<LayerWork> layers = {embedding(shape, n)};
  for (const HalfBlock& half : half_blocks(shape)) layers.push_back(work_of(half, shape, n));
  for (std::int64_t slice = 0; slice < shape.head_slices; ++slice) {
    layers.push_back(head(shape, n, slice));
  }
  return layers;
}

LayerCost layer_cost(const LayerWork& work, const Device& device) {
  const double products = work.matrix_flops / (device.flops_per_s * device.matrix_efficiency);
  const double core = work.core_flops / (device.flops_per_s * device.core_efficiency);
  const double bandwidth = device.bandwidth_bytes_per_s * device.bandwidth_efficiency;
  const double moved = work.moved_bytes / bandwidth;
  const double read = work.product_parameters * device.bytes_per_parameter / bandwidth;
  // W reads and writes the gradient to which it adds.
  const double accumulated = work.product_parameters * 2 * device.bytes_per_gradient / bandwidth;
  constexpr double kBackwardMoved = 1.5;

  LayerCost cost;
  cost.name = work.name;
  cost.forward_s = std::max(products, read) + core + moved;
  if (work.kind == LayerKind::kEmbedding) {
    cost.backward_weight_s = kBackwardMoved * moved;  // nothing before it needs a gradient
  } else {
    cost.backward_input_s =
        std::max(products, read) + work.core_backward * core + kBackwardMoved * moved;
    cost.backward_weight_s = std::max(products, accumulated);
  }
  const double held = work.parameters + work.copied_parameters;
  // The update reads the gradient, and reads and writes weight and optimizer state.
  cost.update_s =
      held *
      (device.bytes_per_gradient + 2 * (device.bytes_per_parameter + device.bytes_per_optimizer)) /
      bandwidth;
  cost.parameter_bytes = to_bytes(held * device.bytes_per_parameter);
  cost.gradient_bytes = to_bytes(held * device.bytes_per_gradient);
  cost.optimizer_bytes = to_bytes(held * device.bytes_per_optimizer);
  cost.activation_bytes = to_bytes(work.activation_bytes);
  cost.boundary_bytes = to_bytes(work.boundary_bytes);
  return cost;
}

ModelCost at_utilization(ModelCost model, const Device& device) {
  for (LayerCost& layer : model.layers) {
    for (double* time :
         {&layer.forward_s, &layer.backward_input_s, &layer.backward_weight_s, &layer.update_s}) {
      *time /= device.utilization;
    }
  }
  return model;
}

Expected<ModelCost> layer_costs(const std::vector<LayerWork>& work, const Device& device) {
  DYNMO_TRY(validate(device));
  ModelCost model;
  for (const LayerWork& layer : work) model.layers.push_back(layer_cost(layer, device));
  DYNMO_TRY(validate(model));
  return model;
}

Expected<ModelCost> transformer_costs(const TransformerShape& shape, const Device& device) {
  DYNMO_TRY(validate(shape));
  DYNMO_TRY(validate(device));
  return layer_costs(transformer_work(shape, device.bytes_per_element), device);
}

}  // namespace dynmo::cost
