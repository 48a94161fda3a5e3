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

// A unit of a layer is what may be removed whole (units.h): a hidden unit of an MLP, or the heads
// of attention that share one head of keys and values.
enum class UnitKind { kHidden, kHeads };

// The parts of a layer's units in one parameter. Elements along dimension `axis` are [sections,
// count, n], with n of each unit in each section.
struct UnitAxis {
  UnitKind kind = UnitKind::kHidden;
  std::int64_t count = 0;  // units of the whole parameter
  std::int64_t axis = 0;
  std::int64_t sections = 1;  // 3 for queries, keys and values in one matrix
  std::int64_t set = 0;       // number of the expert
  friend bool operator==(const UnitAxis&, const UnitAxis&) = default;
};

// Shape and initial values of one parameter.
struct ParameterSpec {
  // Hugging Face's name within the layer: "self_attn.q_proj.weight".
  std::string name;
  std::vector<std::int64_t> shape;
  double init_std = 0;       // std of the normal initial values
  double mean = 0;           // 1 for norms
  bool weight_decay = true;  // true for matrices, false for norms
  // Set for a matrix that the layer uses only in the products of hand_written.h. It may then lose
  // weights (pruned.h).
  bool prunable = false;
  // A part of a matrix whose rows are in several layers (head_slice.h). Its initial values are
  // those that these rows have if the whole matrix is a parameter of an earlier layer.
  struct Piece {
    std::int64_t layers_before = 0;  // from this layer to the earlier one
    std::size_t parameter = 0;       // index in the earlier layer
    std::int64_t first = 0;          // element of the whole; a multiple of 4
  };
  std::optional<Piece> piece = {};
  // Set if it has a part of each unit of its layer.
  std::optional<UnitAxis> units = {};
};

// One parameter and what training holds for it. Value, gradient and moments are fp32, contiguous,
// of one shape, on one device. A frozen layer has no gradient and moments: their memory is freed.
//
// A pruned matrix (pruned.h) has a mask. Its tensors have the matrix's shape, with zeros for
// removed weights. Compressed tensors have one dimension: the kept weights by offset. A parameter
// that has lost units is smaller along their axis: its elements are the kept weights by offset,
// too.
struct Parameter {
  std::string name;
  at::Tensor value;
  at::Tensor gradient;       // accumulated over the micro-batches of a step
  at::Tensor first_moment;   // AdamW's exp_avg
  at::Tensor second_moment;  // AdamW's exp_avg_sq
  bool weight_decay = true;
  // `value` in bf16 if the layer computes in it (precision.h), else undefined. Derived by derive():
  // neither a migration nor a checkpoint holds it.
  at::Tensor compute_copy = {};
  // Weight i of the matrix is kept if bit i % 8 of byte i / 8 is set. uint8, on the value's device.
  // Undefined if all are kept.
  at::Tensor mask = {};
  // The places of the kept weights of a compressed matrix. Derived from the mask by derive().
  std::shared_ptr<const kernels::sparse::Pattern> pattern = {};
  // Number of segments of the pattern. It is known also if the pattern is not, and 0 if the matrix
  // is not compressed.
  std::int64_t segments = 0;
  // The mask removes whole units, and the tensors have no place for them.
  bool by_units = false;
};

// Returns the tensor that a layer computes with.
[[nodiscard]] inline const at::Tensor& compute_value(const Parameter& parameter) {
  return parameter.compute_copy.defined() ? parameter.compute_copy : parameter.value;
}

// A tensor of the state other than a parameter: a mask, a router's bias, a reference copy. It moves
// and is checkpointed with the layer, but never optimized. Layers read it. Sources of dynamism
// (dynamism/training/source.h) write it between steps.
struct BufferSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  at::ScalarType type = at::kFloat;
  double initial = 0;    // of every element
  bool on_host = false;  // the host decides by it
};
struct Buffer {
  std::string name;
  at::Tensor value;  // contiguous, on the device of the parameters, or on_host
  bool on_host = false;
};

struct LayerState {
  LayerId id;
  std::vector<Parameter> parameters;
  // Number of updates so far, for AdamW's bias correction.
  std::int64_t optimizer_steps = 0;
  // Key of the layer's random stream. Draws are a function of (key, step, micro-batch).
  std::uint64_t random_key = 0;
  bool frozen = false;
  std::vector<Buffer> buffers = {};
};

// The layers that a rank owns. Exactly one rank of a replica has a layer's state.
using LayerStates = std::map<LayerId, LayerState>;

class Layer;

// Makes the initial state. Every value comes from philox under (seed, layer, parameter), so it is
// the same on any rank.
[[nodiscard]] LayerState make_state(const Layer& layer, LayerId id, std::uint64_t seed);

// Derives `compute_copy` from the value if the layer computes in bf16, and `pattern` and `segments`
// from the mask of a compressed matrix. Call it after values or masks were written from outside (a
// migration, a checkpoint). make_state() and update() call it themselves.
void derive(const Layer& layer, LayerState& state);

// Returns the state on `device`. Tensors that are already there are shared. On a device other than
// the CPU compressed matrices become masked ones.
[[nodiscard]] LayerState on_device(LayerState state, at::Device device);

// Frees gradients and moments, and keeps the values. From now on the layer runs forward only.
void freeze(LayerState& state);
// Trains the layer again, with new gradients and moments. The count of updates is 0, because it
// corrects the bias of moments that are zero now. Does nothing if the layer was not frozen.
void unfreeze(LayerState& state);

}  // namespace dynmo::model
