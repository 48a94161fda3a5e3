// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/attention_pattern.h"

#include <cstdint>

namespace dynmo::model {

std::vector<std::string> pattern_figures() { return {"pairs", "causal_pairs"}; }

std::vector<double> pattern_figures_of(const at::Tensor& q_BTHK,
                                       const kernels::Selection& selection) {
  const std::int64_t tokens = q_BTHK.size(1);
  return {static_cast<double>(kernels::pairs_of(q_BTHK, selection)),
          static_cast<double>(q_BTHK.size(0) * q_BTHK.size(2) * (tokens * (tokens + 1) / 2))};
}

}  // namespace dynmo::model
