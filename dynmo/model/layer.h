// SPDX-License-Identifier: Apache-2.0
#pragma once

// The movable unit of a model: a half block, the embedding, the final norm + head, or a layer that
// a user writes.
//
// A `Layer` is an immutable description (shapes, initial values, arithmetic) that every rank has. A
// `LayerState` exists once, on the owner. A migration moves it and a checkpoint holds it:
// parameters, moments, buffers, step count, random key. Compute takes three calls, so that
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

  at::Tensor x;  // [B, T, D], or [N, D] if some rows have left
  // The rows of [N, D] that are still here, b * T + t ascending, int32. Undefined if all are.
  at::Tensor rows;
};

// The result of a layer's forward for one micro-batch.
struct Output {
  Hidden hidden = {};  // undefined after the last layer
  // The layer's term of the micro-batch's loss, a scalar. Undefined if it has none.
  at::Tensor loss = {};
  std::vector<double> figures = {};  // in the order of Layer::figures()
  // The figures behind those, fp64 on a device. The engine reads them at the end of the step, so
  // that the host does not wait for each.
  at::Tensor later_figures = {};
  // Set in Pass::kGeneration if rows leave at this layer: their numbers, as in Hidden::rows, and
  // their scores before softmax, [rows, vocabulary].
  at::Tensor left_rows = {};
  at::Tensor left_scores = {};
};

enum class Pass {
  kTraining,    // dropout is on
  kValidation,  // losses without gradients
  kGeneration,  // scores of the next token
};

// The inputs that a layer may need in addition to x.
struct LayerContext {
  std::int64_t step = 0;
  MicroBatchId micro_batch;
  Pass pass = Pass::kTraining;
  at::Tensor tokens_BT = {};   // int64 inputs (first layer); B sequences of T tokens
  at::Tensor targets_BT = {};  // int64 next tokens, if Needs::targets
  // For generation alone. The tokens in `tokens_BT` follow those whose keys and values are here. If
  // null, they are all tokens.
  KeyValueCache* cache = nullptr;
  // 1 / micro-batches of the step. A layer multiplies the gradient of its own loss by it.
  double loss_weight = 1;
  // B and T, for layers that get Hidden::rows.
  std::int64_t sequences = 0;
  std::int64_t sequence_length = 0;
};

// The parts of a context that a layer reads.
struct Needs {
  bool targets = false;  // LayerContext::targets_BT
  bool loss = false;     // sets Output::loss
  // Set if the output may have fewer rows than the input. Later layers then get Hidden::rows. Only
  // such a layer may change Hidden::rows.
  bool drops_rows = false;
};

// The tensors that a layer saves from forward until its weight gradient is done.
class Stash {
 public:
  virtual ~Stash() = default;
  // Returns the bytes of the saved tensors and of the layer's input, but not of parameters, tokens
  // and targets. Returns nullopt if only a meter of the allocator could tell.
  [[nodiscard]] virtual std::optional<Bytes> bytes() const { return std::nullopt; }
};

// Describes a layer. A decorator derives from ForwardingLayer (forwarding_layer.h), so that it
// forgets no virtual function.
class Layer {
 public:
  virtual ~Layer() = default;

  [[nodiscard]] virtual std::string name() const = 0;  // "blocks.3.attention"
  [[nodiscard]] virtual std::vector<ParameterSpec> parameters() const = 0;
  [[nodiscard]] virtual std::vector<BufferSpec> buffers() const { return {}; }
  // Returns the names of what the layer counts or measures in each micro-batch of a training step.
  // The engine sums these figures over the micro-batches in their order, then over the replicas.
  // Every rank gets the figures of every layer.
  [[nodiscard]] virtual std::vector<std::string> figures() const { return {}; }
  [[nodiscard]] virtual Needs needs() const { return {}; }
  // Returns the type of operands and hidden tensors: fp32, or bf16 from precision.h.
  [[nodiscard]] virtual at::ScalarType compute_type() const { return at::kFloat; }
  // Returns how many fp32 numbers for each token the layer passes on instead of a hidden value
  // (head_slice.h). Their gradient is fp32, too. Returns 0 if the layer passes a hidden value.
  [[nodiscard]] virtual std::int64_t floats_passed() const { return 0; }

  // Computes the output. `input` is the hidden value of the previous layer, undefined for the
  // first. `stash` is null if no gradient is needed (frozen prefix, validation). Then nothing is
  // saved and no graph is built.
  //
  // A layer uses the operands of `state`'s parameters, never its gradients, and changes nothing in
  // it. A second forward of the same micro-batch gives the same bits.
  [[nodiscard]] virtual Output forward(const LayerState& state, const Hidden& input,
                                       const LayerContext& context,
                                       std::unique_ptr<Stash>* stash) const = 0;
  // Returns the gradient of input.x, given that of output.hidden.x, which is undefined after the
  // last layer. The layer itself adds the gradient of its own loss, times the context's
  // loss_weight.
  //
  // The result is undefined if the layer has no input (embedding). It is undefined, too, if it is
  // not `wanted` (first layer behind a frozen prefix).
  using InputGradient = kernels::InputGradient;
  [[nodiscard]] virtual at::Tensor input_gradient(const LayerState& state, Stash& stash,
                                                  const at::Tensor& output_gradient,
                                                  InputGradient wanted) const = 0;
  // Adds the weight gradients of the stash's micro-batch to state.parameters[i].gradient, in place.
  // A frozen layer adds nothing. Called once, after input_gradient, in micro-batch order.
  virtual void weight_gradient(LayerState& state, Stash& stash) const = 0;
};

// The layers of a model by LayerId. Shared by all ranks; immutable.
using Model = std::vector<std::shared_ptr<const Layer>>;

// Returns whether any layer has Needs::drops_rows.
[[nodiscard]] bool drops_rows(const Model& model);

}  // namespace dynmo::model
