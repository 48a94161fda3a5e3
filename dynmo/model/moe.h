// SPDX-License-Identifier: Apache-2.0
#pragma once

// A mixture of experts that replaces a block's MLP. It computes x + dropout(sum over a token's
// experts of gate_e(n) expert_e(n)), n = rms_norm(x). Each expert is an MLP down(silu(gate(n)) *
// up(n)). A router (moe_router.h) decides which tokens it gets.
//
// Rows are sorted by expert, stably, and each expert multiplies only its own rows. So the work is
// proportional to the assignments. A token's results are gathered and added in the order of its
// slots, so the result does not vary.

#include <cstdint>
#include <memory>

#include "dynmo/model/layer.h"
#include "dynmo/model/moe_router.h"

namespace dynmo::model {

struct MoeConfig {
  RouterOptions router;
  std::int64_t intermediate = 0;  // of an expert; 0: that of the MLP
};

// A second base of MLPs, through which a source of dynamism replaces them by experts. Such a layer
// is called "blocks.3.moe" instead of "blocks.3.mlp", as in the planner. It has the figures
// moe_figures(). Its losses act only in its gradients.
//
// Its parameters are Mixtral's. The norm comes first, then "block_sparse_moe.gate.weight" (the
// router, fp32 in any precision). Then come "block_sparse_moe.experts.E.w1.weight" (gate), w3 (up)
// and w2 (down) of each expert. With kBias it has a buffer kMoeBias, written between steps to even
// out the counts.
class TakesExperts {
 public:
  virtual ~TakesExperts() = default;
  // Returns the layer with experts. Requires sizes and counts above 0, top_k <= experts.
  [[nodiscard]] virtual std::shared_ptr<const Layer> with(const MoeConfig& config) const = 0;
};

inline constexpr const char* kMoeBias = "block_sparse_moe.bias";

}  // namespace dynmo::model
