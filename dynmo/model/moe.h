// SPDX-License-Identifier: Apache-2.0
#pragma once

// A mixture of experts in the place of a block's MLP: x + dropout(sum over a token's experts of
// gate_e(n) expert_e(n)), n = rms_norm(x), where each expert is an MLP down(silu(gate(n)) * up(n))
// and a router (moe_router.h) says which tokens it gets. Rows are sorted by expert, stably; each
// expert multiplies its rows alone, and a token's results are gathered and added in the order of
// its slots: the work goes by the assignments, and one order of sums gives one result.

#include <cstdint>
#include <memory>

#include "dynmo/model/layer.h"
#include "dynmo/model/moe_router.h"

namespace dynmo::model {

struct MoeConfig {
  RouterOptions router;
  std::int64_t intermediate = 0;  // of an expert; 0: that of the MLP
};

// An MLP derives from this class too, so that a source of dynamism can put experts in its place.
// Such a layer is called "blocks.3.moe" instead of "blocks.3.mlp", as the planner calls it, and has
// Mixtral's parameters: norm, "block_sparse_moe.gate.weight" (the router, fp32 in any precision),
// then "block_sparse_moe.experts.E.w1.weight" (gate), w3 (up) and w2 (down) of each expert; of
// kBias a buffer, kMoeBias, which who evens the counts out writes between steps; and moe_figures.
// Its losses act in its gradients alone.
class TakesExperts {
 public:
  virtual ~TakesExperts() = default;
  // Requires sizes and counts above 0, top_k <= experts.
  [[nodiscard]] virtual std::shared_ptr<const Layer> with(const MoeConfig& config) const = 0;
};

inline constexpr const char* kMoeBias = "block_sparse_moe.bias";

}  // namespace dynmo::model
