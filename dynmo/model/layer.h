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
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/core/units.h"
#include "dynmo/kernels/input_gradient.h"
#include "dynmo/model/layer_state.h"

namespace dynmo::model {

class KeyValueCache;

// The activations that pass from layer to layer.
struct Hidden {
  Hidden() = default;
  Hidden(at::Tensor values, at::Tensor still_here = {})  // NOLINT: a dense tensor is a Hidden
      : x(std::move(values)), rows(std::move(still_here)) {}

  at::Tensor x;  // [B, T, D]; or [N, D] where some rows have left
  // The rows of [N, D] that are still here, b * T + t ascending, int32. Undefined: all of them.
  at::Tensor rows;
};

// The result of a layer's forward for one micro-batch.
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

// The inputs that a layer may need besides x.
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

// The parts of a context that a layer reads.
struct Needs {
  bool targets = false;  // LayerContext::targets_BT
  bool loss = false;     // a place for Output::loss
  // Its output may have fewer rows than its input, so that layers behind it get Hidden::rows. Only
  // such a layer may name other rows than it was given.
  bool drops_rows = false;
};

// The tensors that a layer saves from forward until its weight gradient is done.
class Stash {
 public:
  virtual ~Stash() = default;
  // Bytes of the saved tensors, the layer's input included; not of parameters, tokens and targets.
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
  // The type of operands and hidden tensors: fp32, or bf16 as precision.h makes it.
  [[nodiscard]] virtual at::ScalarType compute_type() const { return at::kFloat; }
  // How many fp32 numbers it passes on for each token, and gets a gradient of in fp32, in place of
  // a hidden value (head_slice.h). 0: it passes a hidden value.
  [[nodiscard]] virtual std::int64_t floats_passed() const { return 0; }

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
  using InputGradient = kernels::InputGradient;
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

}  // namespace dynmo::model
