// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/adamw.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <span>

#include "dynmo/core/check.h"
#include "dynmo/kernels/adamw_loops.h"
#include "dynmo/kernels/fused.h"
#include "dynmo/kernels/generic.h"

namespace dynmo::model {
namespace {

using kernels::device::AdamWFactors;

// Returns the factors of one step's update. They are the same for all elements of a layer, except
// for the decay.
AdamWFactors factors_of(std::int64_t step, const AdamWOptions& options, double scale) {
  const auto count = static_cast<double>(step);
  return {.gradient = static_cast<float>(scale),
          .first = static_cast<float>(1 - options.beta1),
          .second = static_cast<float>(1 - options.beta2),
          .second_kept = static_cast<float>(options.beta2),
          .rate = static_cast<float>(-options.learning_rate / (1 - std::pow(options.beta1, count))),
          .deviation = static_cast<float>(std::sqrt(1 - std::pow(options.beta2, count))),
          .epsilon = static_cast<float>(options.epsilon),
          .kept = 1};
}

// Updates by libtorch, in three passes. Used for fp64 (tests of whole models) and for devices
// without kernels of our own.
void update_by_libtorch(Parameter& parameter, std::int64_t step, const AdamWOptions& options,
                        double scale) {
  const at::NoGradGuard no_graph;
  parameter.gradient.mul_(scale);
  at::_fused_adamw_(
      {parameter.value}, {parameter.gradient}, {parameter.first_moment}, {parameter.second_moment},
      /*max_exp_avg_sqs=*/{},
      {at::full({}, static_cast<double>(step), parameter.value.options().dtype(at::kFloat))},
      options.learning_rate, options.beta1, options.beta2,
      parameter.weight_decay ? options.weight_decay : 0, options.epsilon,
      /*amsgrad=*/false, /*maximize=*/false);
  parameter.gradient.zero_();
  if (parameter.compute_copy.defined()) parameter.compute_copy.copy_(parameter.value);
}

template <typename Scalar>
double sum_of_squares(const at::Tensor& tensor) {
  return kernels::sum_of_squares(std::span<const Scalar>(tensor.const_data_ptr<Scalar>(),
                                                         static_cast<std::size_t>(tensor.numel())));
}

}  // namespace

void update(LayerState& state, const AdamWOptions& options, double scale) {
  if (state.frozen) return;
  ++state.optimizer_steps;
  AdamWFactors factors = factors_of(state.optimizer_steps, options, scale);
  for (Parameter& parameter : state.parameters) {
    for (const at::Tensor* tensor : {&parameter.value, &parameter.gradient, &parameter.first_moment,
                                     &parameter.second_moment}) {
      DYNMO_CHECK(tensor->is_contiguous() && tensor->sizes() == parameter.value.sizes(),
                  "contiguous tensors of one shape for {}", parameter.name);
    }
    const double decay = parameter.weight_decay ? options.weight_decay : 0;
    factors.kept = static_cast<float>(1 - options.learning_rate * decay);
    const bool on_cpu = parameter.value.is_cpu();
    if (!on_cpu && kernels::fused::serves(parameter.value,
                                          {parameter.gradient, parameter.first_moment,
                                           parameter.second_moment, parameter.compute_copy})) {
      kernels::fused::update(parameter.value, parameter.gradient, parameter.first_moment,
                             parameter.second_moment, parameter.compute_copy, factors);
      continue;
    }
    if (parameter.value.scalar_type() == at::kDouble || !on_cpu) {
      update_by_libtorch(parameter, state.optimizer_steps, options, scale);
      continue;
    }
    kernels::AdamWElements elements{
        .value = parameter.value.mutable_data_ptr<float>(),
        .gradient = parameter.gradient.mutable_data_ptr<float>(),
        .first_moment = parameter.first_moment.mutable_data_ptr<float>(),
        .second_moment = parameter.second_moment.mutable_data_ptr<float>()};
    if (parameter.compute_copy.defined()) {
      elements.rounded =
          reinterpret_cast<std::uint16_t*>(parameter.compute_copy.mutable_data_ptr<at::BFloat16>());
    }
    kernels::update(elements, parameter.value.numel(), factors);
  }
}

void zero_gradients(LayerState& state) {
  for (Parameter& parameter : state.parameters) {
    if (parameter.gradient.defined()) parameter.gradient.zero_();
  }
}

double squared_norm(const LayerState& state) {
  double total = 0;
  for (const Parameter& parameter : state.parameters) total += squared_norm(parameter);
  return total;
}

double squared_norm(const Parameter& parameter) {
  if (!parameter.gradient.defined()) return 0;
  DYNMO_CHECK(parameter.gradient.is_contiguous(), "a contiguous gradient of {}", parameter.name);
  if (!parameter.gradient.is_cpu()) return kernels::generic::sum_of_squares(parameter.gradient);
  return parameter.gradient.scalar_type() == at::kDouble
             ? sum_of_squares<double>(parameter.gradient)
             : sum_of_squares<float>(parameter.gradient);
}

double clip_factor(double total_norm, double max_norm) {
  if (max_norm == 0 || total_norm <= max_norm) return 1;
  return max_norm / total_norm;
}

}  // namespace dynmo::model
