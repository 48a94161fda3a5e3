// SPDX-License-Identifier: Apache-2.0
#pragma once

// The parts that the router's two forms share. The form of the CPU is made of loops
// (moe_router.cpp), that of a device of libtorch's operations (moe_router_on_device.cpp). Both
// compute in fp64.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "dynmo/model/moe_router.h"

namespace dynmo::model {

inline constexpr int kSinkhornRounds = 8;

// Returns the number of tokens that an expert takes at most.
[[nodiscard]] std::int64_t capacity_of(const RouterOptions& options, std::int64_t tokens);

// Returns whether gates are shares of several experts, so that each depends on the others.
[[nodiscard]] inline bool shares(const RouterOptions& options) {
  return options.router != MoeRouter::kExpertChoice && options.top_k > 1;
}
[[nodiscard]] inline bool has_aux_loss(const RouterOptions& options) {
  return options.router == MoeRouter::kTopK && options.aux_loss != 0;
}
// Returns whether an expert leaves out tokens beyond its capacity.
[[nodiscard]] inline bool drops(const RouterOptions& options, Pass pass) {
  return options.router != MoeRouter::kExpertChoice && options.capacity_factor > 0 &&
         pass == Pass::kTraining;
}

// route() and routing_gradient() for scores on a device.
[[nodiscard]] Routing route_on_device(const RouterOptions& options, const at::Tensor& scores_NE,
                                      const at::Tensor& bias_E, Pass pass);
[[nodiscard]] at::Tensor routing_gradient_on_device(const RouterOptions& options,
                                                    const Routing& routing,
                                                    const at::Tensor& gates_gradient_NK,
                                                    double loss_weight);

}  // namespace dynmo::model
