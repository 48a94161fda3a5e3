// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/queued_norms.h"

#include <ATen/ATen.h>

#include "dynmo/kernels/host_memory.h"
#include "dynmo/runtime/ties.h"

namespace dynmo::runtime {

QueuedNorms::QueuedNorms(const std::vector<model::Tie>& ties, const model::LayerStates& states,
                         const Staging& staging) {
  std::vector<at::Tensor> norms;
  for (const auto& [id, state] : states) {
    if (state.frozen) continue;
    int count = 0;
    for (const model::Parameter& parameter : state.parameters) {
      if (!parameter.gradient.defined() || is_second(ties, state.id, parameter.name)) continue;
      norms.push_back(at::linalg_vector_norm(parameter.gradient, 2, /*dim=*/{}, /*keepdim=*/false,
                                             at::kDouble));
      ++count;
    }
    counts_.emplace_back(id, count);
  }
  if (!norms.empty()) host_ = staging.to_host_later(at::stack(norms));
}

std::map<LayerId, double> QueuedNorms::read() const {
  std::map<LayerId, double> squared;
  const double* next = host_.defined() ? kernels::host_data<const double>(host_) : nullptr;
  for (const auto& [id, count] : counts_) {
    double& total = squared[id];
    for (int i = 0; i < count; ++i, ++next) total += *next * *next;
  }
  return squared;
}

}  // namespace dynmo::runtime
