// SPDX-License-Identifier: Apache-2.0
#pragma once

// The state of a layer, which exists once, on the rank that owns it. A migration moves it and a
// checkpoint holds it: parameters with their moments, buffers, the count of updates, the random
// key.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/core/rng.h"

namespace dynmo::kernels::sparse {
struct Pattern;  // kernels/sparse_products.h
}

namespace dynmo::model {

// Shape and initial values of one parameter.
struct ParameterSpec {
  std::string name;  // Hugging Face's, within the layer: "self_attn.q_proj.weight"
  std::vector<std::int64_t> shape;
  double init_std = 0;       // of the normal initial values
  double mean = 0;           // 1 for norms
  bool weight_decay = true;  // weight decay applies (matrices: yes; norms: no)
  // A matrix that the layer uses in the products of hand_written.h alone, so that it may lose
  // weights (pruned.h).
  bool prunable = false;
  // A matrix may lie in pieces in several layers (head_slice.h). The initial values of a piece are
  // those of its rows in the whole matrix, as a parameter of a layer further to the front.
  struct Piece {
    std::int64_t layers_before = 0;  // from this layer to that one
    std::size_t parameter = 0;       // of that layer
    std::int64_t first = 0;          // element of the whole; a multiple of 4
  };
  std::optional<Piece> piece = {};
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
  bool weight_decay = true;
  // `value` in bf16 where the layer computes in it (precision.h), else undefined. Derived: neither
  // a migration nor a checkpoint carries it; see derive.
  at::Tensor compute_copy = {};
  // Weight i of the matrix is kept where bit i % 8 of byte i / 8 is set; uint8, on the CPU.
  // Undefined: all are.
  at::Tensor mask = {};
  // Where the kept weights lie, of a compressed matrix. Derived from the mask, as `compute_copy`
  // is.
  std::shared_ptr<const kernels::sparse::Pattern> pattern = {};
  // The pattern's, which are known where the pattern is not; 0 of a matrix that is not compressed.
  std::int64_t segments = 0;
};

// Returns the tensor that a layer computes with.
[[nodiscard]] inline const at::Tensor& compute_value(const Parameter& parameter) {
  return parameter.compute_copy.defined() ? parameter.compute_copy : parameter.value;
}

// A tensor of the state that is no parameter: a mask, a router's bias, a reference copy. It moves
// and is checkpointed with the layer, but never optimized. Layers read it; sources of dynamism
// (dynamism/training/source.h) write it between steps.
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

class Layer;

// Initial state: every value from philox under (seed, layer, parameter), so it does not depend on
// who makes it.
[[nodiscard]] LayerState make_state(const Layer& layer, LayerId id, std::uint64_t seed);

// Makes what is derived of every parameter: `compute_copy` from its value where the layer computes
// in bf16, `pattern` and `segments` from the mask of a compressed matrix. Due after values or masks
// were written from outside (a migration, a checkpoint); make_state and update do it.
void derive(const Layer& layer, LayerState& state);

// The state with all its tensors on `device`: those that are there already are shared.
[[nodiscard]] LayerState on_device(LayerState state, at::Device device);

// Frees gradients and moments; the layer runs forward only from now on (and keeps its values).
void freeze(LayerState& state);
// Trains again, with new gradients and moments and the count of updates at 0 (a bias correction for
// moments that have just been zeroed). Nothing if it was not frozen.
void unfreeze(LayerState& state);

}  // namespace dynmo::model
