// SPDX-License-Identifier: Apache-2.0
#pragma once

// The movable unit of a model: a half block, the embedding, the final norm + head, or a layer of
// the user's own.
//
// A `Layer` is an immutable description (shapes, initial values, arithmetic) that every rank has. A
// `LayerState` is what exists once, on the owner, and what a migration moves and a checkpoint
// holds: parameters, moments, buffers, step count, random key. Compute is three calls, so that
// schedules may run input and weight gradients apart.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/core/rng.h"
#include "dynmo/core/units.h"

namespace dynmo::model {

class KeyValueCache;
namespace sparse {
struct Pattern;  // sparse_products_impl.h
}

// Shape and initial values of one parameter.
struct ParameterSpec {
  std::string name;  // Hugging Face's, within the layer: "self_attn.q_proj.weight"
  std::vector<std::int64_t> shape;
  double deviation = 0;  // of the normal initial values
  double mean = 0;       // 1 for norms
  bool decays = true;    // weight decay applies (matrices: yes; norms: no)
  // A matrix that the layer uses in the products of hand_written_impl.h alone, so that it may lose
  // weights (pruned.h).
  bool prunable = false;
};

// One parameter and what training holds for it. Value, gradient and moments are fp32, contiguous,
// of one shape, on one device. A frozen layer has undefined gradient and moments: their memory is
// freed.
// A pruned matrix (pruned.h) has a mask. Its tensors have the matrix's shape, with zeros where a
// weight is gone, or are compressed: one dimension, the kept weights by offset.
struct Parameter {
  std::string name;
  at::Tensor value;
  at::Tensor gradient;       // accumulated over the micro-batches of a step
  at::Tensor first_moment;   // AdamW's exp_avg
  at::Tensor second_moment;  // AdamW's exp_avg_sq
  bool decays = true;
  // `value` in bf16 where the layer computes in it (precision.h), else undefined. Derived: neither
  // a migration nor a checkpoint carries it; see derive.
  at::Tensor rounded = {};
  // Weight i of the matrix is kept where bit i % 8 of byte i / 8 is set; uint8, on the CPU.
  // Undefined: all are.
  at::Tensor mask = {};
  // Where the kept weights lie, of a compressed matrix. Derived from the mask, as `rounded` is.
  std::shared_ptr<const sparse::Pattern> pattern = {};
};

// What a layer computes with.
[[nodiscard]] inline const at::Tensor& operand(const Parameter& parameter) {
  return parameter.rounded.defined() ? parameter.rounded : parameter.value;
}

// A tensor of the state that is no parameter: a mask, a router's bias, a reference copy. It moves
// and is checkpointed with the layer, but never optimized. Layers read it; sources of dynamism
// (dynamism/source.h) write it between steps.
struct BufferSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  at::ScalarType type = at::kFloat;
  double initial = 0;  // every element
};
struct Buffer {
  std::string name;
  at::Tensor value;  // contiguous, on the device of the parameters
};

struct LayerState {
  LayerId id;
  std::vector<Parameter> parameters;
  std::int64_t optimizer_steps = 0;  // updates so far: AdamW's bias correction
  std::uint64_t random_key =
      0;  // key of the layer's random stream; draws are a function of (key, step, micro-batch)
  bool frozen = false;
  std::vector<Buffer> buffers = {};
};

// The layers that a rank owns. Exactly one rank of a replica has a layer's state.
using LayerStates = std::map<LayerId, LayerState>;

// What passes from layer to layer.
struct Hidden {
  Hidden() = default;
  Hidden(at::Tensor values, at::Tensor still_here = {})  // NOLINT: a dense tensor is a Hidden
      : x(std::move(values)), rows(std::move(still_here)) {}

  at::Tensor x;  // [B, T, D]; or [N, D] where some rows have left
  // Of [N, D]: the rows that are still here, b * T + t ascending, int32. Undefined: all of them.
  at::Tensor rows;
};

// What a layer makes of one micro-batch.
struct Output {
  Hidden hidden = {};    // undefined behind the last layer
  at::Tensor loss = {};  // this layer's term of the micro-batch's loss, a scalar; undefined: none
  std::vector<double> figures = {};  // as many as Layer::figures() names
  // Pass::kGeneration: rows that have left here, numbered as Hidden::rows, and their scores before
  // softmax, [rows, vocabulary]. Undefined: none.
  at::Tensor left_rows = {};
  at::Tensor left_scores = {};
};

enum class Pass {
  kTraining,    // dropout is on
  kValidation,  // losses without gradients
  kGeneration,  // scores of the next token
};

// What a layer may need besides its input.
struct LayerContext {
  std::int64_t step = 0;
  MicroBatchId micro_batch;
  Pass pass = Pass::kTraining;
  at::Tensor tokens_BT = {};   // int64 inputs (first layer); B sequences of T tokens
  at::Tensor targets_BT = {};  // int64 next tokens, where Needs::targets says so
  // Generation alone: tokens_BT follow those whose keys and values are here. Null: they are all.
  KeyValueCache* cache = nullptr;
  // 1 / micro-batches of the step. A layer multiplies the gradient of its own loss with it.
  double loss_weight = 1;
  // B and T, for layers that get Hidden::rows.
  std::int64_t sequences = 0;
  std::int64_t sequence_length = 0;
};

// What the engine has to have ready for a layer.
struct Needs {
  bool targets = false;  // LayerContext::targets_BT
  bool loss = false;     // a place for Output::loss
  // Its output may have fewer rows than its input, so that layers behind it get Hidden::rows. Only
  // such a layer may name other rows than it was given.
  bool drops_rows = false;
};

// What a layer saves from forward until its weight gradient is done.
class Stash {
 public:
  virtual ~Stash() = default;
  // Of the saved tensors, the layer's input included; not of parameters, tokens and targets.
  // nullopt: not known without metering the allocator.
  [[nodiscard]] virtual std::optional<Bytes> bytes() const { return std::nullopt; }
};

// A decorator of layers derives from ForwardingLayer (forwarding_layer.h), so that no virtual
// function is forgotten.
class Layer {
 public:
  virtual ~Layer() = default;

  [[nodiscard]] virtual std::string name() const = 0;  // "blocks.3.attention"
  [[nodiscard]] virtual std::vector<ParameterSpec> parameters() const = 0;
  [[nodiscard]] virtual std::vector<BufferSpec> buffers() const { return {}; }
  // Names of what the layer counts or measures in each micro-batch of a training step. The engine
  // adds them up over the micro-batches in their order, then over the replicas; every rank learns
  // every layer's.
  [[nodiscard]] virtual std::vector<std::string> figures() const { return {}; }
  [[nodiscard]] virtual Needs needs() const { return {}; }
  // Of operands and hidden tensors: fp32, or bf16 as precision.h makes it.
  [[nodiscard]] virtual at::ScalarType compute_type() const { return at::kFloat; }

  // input: the hidden value of the layer before (undefined for the first). `stash` is null where no
  // gradient will be asked for (frozen prefix, validation): nothing is saved and no graph is built.
  // A layer uses the operands of `state`'s parameters, never its gradients, and changes nothing in
  // it: a second forward of the same micro-batch gives the same bits.
  [[nodiscard]] virtual Output forward(const LayerState& state, const Hidden& input,
                                       const LayerContext& context,
                                       std::unique_ptr<Stash>* stash) const = 0;
  // Gradient of input.x, given that of output.hidden.x (undefined behind the last layer). The layer
  // itself adds the gradient of its own loss, times the context's loss_weight. Undefined where the
  // layer has no input (embedding), or where `wanted` says that nobody will use it (first layer
  // behind a frozen prefix).
  enum class InputGradient { kWanted, kNotWanted };
  [[nodiscard]] virtual at::Tensor input_gradient(const LayerState& state, Stash& stash,
                                                  const at::Tensor& output_gradient,
                                                  InputGradient wanted) const = 0;
  // Adds the weight gradients of the stash's micro-batch to state.parameters[i].gradient, in place;
  // a layer that is frozen adds nothing. Called once, after input_gradient, in micro-batch order.
  virtual void weight_gradient(LayerState& state, Stash& stash) const = 0;
};

// The layers of a model by LayerId. Shared by all ranks; immutable.
using Model = std::vector<std::shared_ptr<const Layer>>;

// Whether any of them does (Needs::drops_rows).
[[nodiscard]] bool drops_rows(const Model& model);

// Two parameters that are one, such as the matrices of embedding and head. Each layer has a copy
// of value and moments and a gradient of its own; the two gradients are added once at the end of a
// step, so that equal updates keep the copies equal, bit for bit, wherever the layers are.
// The initial value is the first's.
struct Tie {
  LayerId first;
  std::string first_parameter;  // ParameterSpec::name
  LayerId second;
  std::string second_parameter;
};

// A layer that is one function, differentiated by autograd: the start of every new layer, and the
// oracle of hand-written ones. `parameters` are the operands of `specs` in order. Autograd computes
// both gradients in one pass at input_gradient; weight_gradient only adds them up.
// The rows of a ragged input pass through, unless the function's Output names others.
using AutogradFunction =
    std::function<Output(const std::vector<at::Tensor>& parameters, const at::Tensor& input,
                         const LayerContext& context, const LayerState& state)>;
// For layers that only map a hidden tensor to the next one.
using HiddenFunction =
    std::function<at::Tensor(const std::vector<at::Tensor>& parameters, const at::Tensor& input,
                             const LayerContext& context, const LayerState& state)>;
// What an autograd layer has besides parameters and its function.
struct AutogradTraits {
  std::vector<BufferSpec> buffers = {};
  std::vector<std::string> figures = {};
  Needs needs = {};
};
[[nodiscard]] std::shared_ptr<const Layer> autograd_layer(std::string name,
                                                          std::vector<ParameterSpec> specs,
                                                          AutogradFunction function,
                                                          AutogradTraits traits = {});
[[nodiscard]] std::shared_ptr<const Layer> autograd_layer(std::string name,
                                                          std::vector<ParameterSpec> specs,
                                                          HiddenFunction function,
                                                          AutogradTraits traits = {});

// Initial state: every value from philox under (seed, layer, parameter), so it does not depend on
// who makes it.
[[nodiscard]] LayerState make_state(const Layer& layer, LayerId id, std::uint64_t seed);

// Makes what is derived of every parameter: `rounded` from its value where the layer computes in
// bf16, `pattern` from the mask of a compressed matrix. Due after values or masks were written from
// outside (a migration, a checkpoint); make_state and update do it.
void derive(const Layer& layer, LayerState& state);

// The state with all its tensors on `device`: those that are there already are shared.
[[nodiscard]] LayerState on_device(LayerState state, at::Device device);

// Frees gradients and moments; the layer runs forward only from now on (and keeps its values).
void freeze(LayerState& state);
// Trains again, with new gradients and moments and the count of updates at 0 (a bias correction for
// moments that have just been zeroed). Nothing if it was not frozen.
void unfreeze(LayerState& state);

// Dropout of the given probability with draws from core/rng.h under (state.random_key, step,
// micro-batch, salt): the same numbers wherever the layer runs. Identity when not training or p =
// 0.
[[nodiscard]] at::Tensor dropout(const at::Tensor& input, double p, const LayerState& state,
                                 const LayerContext& context, std::uint64_t salt);

}  // namespace dynmo::model
