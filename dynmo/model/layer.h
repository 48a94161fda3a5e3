// SPDX-License-Identifier: Apache-2.0
#pragma once

// The movable unit of a model: a half block, the embedding, the final norm + head, or a layer of
// the user's own.
//
// A `Layer` is an immutable description (shapes, initial values, arithmetic) that every rank has. A
// `LayerState` is what exists once, on the owner, and what a migration moves and a checkpoint
// holds: parameters, moments, step count, random key. Compute is three calls, so that schedules may
// run input and weight gradients apart.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/core/rng.h"

namespace dynmo::model {

// Shape and initial values of one parameter.
struct ParameterSpec {
  std::string name;  // Hugging Face's, within the layer: "self_attn.q_proj.weight"
  std::vector<std::int64_t> shape;
  double deviation = 0;  // of the normal initial values
  double mean = 0;       // 1 for norms
  bool decays = true;    // weight decay applies (matrices: yes; norms: no)
};

// One parameter with what training keeps beside it. All tensors but `rounded` fp32, contiguous, of
// one shape, on one device. A frozen layer has undefined gradient and moments: their memory is
// freed.
struct Parameter {
  std::string name;
  at::Tensor value;
  at::Tensor gradient;       // accumulated over the micro-batches of a step
  at::Tensor first_moment;   // AdamW's exp_avg
  at::Tensor second_moment;  // AdamW's exp_avg_sq
  bool decays = true;
  // `value` in bf16 where the layer computes in it (precision.h), else undefined. Derived: neither
  // a migration nor a checkpoint carries it; see round_values.
  at::Tensor rounded = {};
};

// What a layer computes with.
[[nodiscard]] inline const at::Tensor& operand(const Parameter& parameter) {
  return parameter.rounded.defined() ? parameter.rounded : parameter.value;
}

struct LayerState {
  LayerId id;
  std::vector<Parameter> parameters;
  std::int64_t optimizer_steps = 0;  // updates so far: AdamW's bias correction
  std::uint64_t random_key =
      0;  // key of the layer's random stream; draws are a function of (key, step, micro-batch)
  bool frozen = false;
};

// What a layer may need besides its input.
struct LayerContext {
  std::int64_t step = 0;
  MicroBatchId micro_batch;
  bool training = true;   // dropout is on
  at::Tensor tokens_BT;   // int64 inputs (embedding); B sequences of T tokens
  at::Tensor targets_BT;  // int64 next tokens (head)
};

// What a layer keeps from forward until its weight gradient is done.
class Stash {
 public:
  virtual ~Stash() = default;
};

class Layer {
 public:
  virtual ~Layer() = default;

  [[nodiscard]] virtual std::string name() const = 0;  // "blocks.3.attention"
  [[nodiscard]] virtual std::vector<ParameterSpec> parameters() const = 0;
  // Of operands and hidden tensors: fp32, or bf16 as precision.h makes it.
  [[nodiscard]] virtual at::ScalarType compute_type() const { return at::kFloat; }

  // input: hidden_BTD of the layer before (undefined for the embedding). Returns hidden_BTD; the
  // head returns the mean loss of the micro-batch, a scalar. `stash` is null where no gradient will
  // be asked for (frozen prefix, validation): nothing is kept and no graph is built. A layer uses
  // the operands of `state`'s parameters, never its gradients.
  [[nodiscard]] virtual at::Tensor forward(const LayerState& state, const at::Tensor& input,
                                           const LayerContext& context,
                                           std::unique_ptr<Stash>* stash) const = 0;
  // Gradient of the input, given that of the output (of the loss: the scale the engine wants, a
  // scalar in memory of the CPU wherever the layer is, so that it is read without waiting).
  // Undefined where the layer has no input (embedding), or where `wanted` says that nobody will use
  // it (first layer behind a frozen prefix).
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
using AutogradFunction =
    std::function<at::Tensor(const std::vector<at::Tensor>& parameters, const at::Tensor& input,
                             const LayerContext& context, const LayerState& state)>;
[[nodiscard]] std::shared_ptr<const Layer> autograd_layer(std::string name,
                                                          std::vector<ParameterSpec> specs,
                                                          AutogradFunction function);

// Initial state: every value from philox under (seed, layer, parameter), so it does not depend on
// who makes it.
[[nodiscard]] LayerState make_state(const Layer& layer, LayerId id, std::uint64_t seed);

// Makes `rounded` of every parameter from its value, where the layer computes in bf16. Due after
// values were written from outside (a migration, a checkpoint); make_state and update do it.
void round_values(const Layer& layer, LayerState& state);

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
