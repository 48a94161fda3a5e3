// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/adamw.h"

#include <ATen/ATen.h>

#include <array>
#include <span>
#include <vector>

#include "dynmo/core/check.h"

namespace dynmo::model {
namespace {

struct Group {
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> first_moments;
  std::vector<at::Tensor> second_moments;
};

Group parameters_that(LayerState& state, bool decay) {
  Group group;
  for (Parameter& parameter : state.parameters) {
    if (parameter.decays != decay) continue;
    group.values.push_back(parameter.value);
    group.gradients.push_back(parameter.gradient);
    group.first_moments.push_back(parameter.first_moment);
    group.second_moments.push_back(parameter.second_moment);
  }
  return group;
}

void update_group(const Group& group, std::int64_t step, double decay,
                  const AdamWOptions& options) {
  if (group.values.empty()) return;
  const std::vector<at::Tensor> steps(group.values.size(),
                                      at::scalar_tensor(static_cast<double>(step), at::kFloat));
  at::_fused_adamw_(group.values, group.gradients, group.first_moments, group.second_moments,
                    /*max_exp_avg_sqs=*/{}, steps, options.learning_rate, options.beta1,
                    options.beta2, decay, options.epsilon, /*amsgrad=*/false, /*maximize=*/false);
}

// Eight running sums, added up at the end: vectors without giving up a fixed order.
template <typename Scalar>
double sum_of_squares(std::span<const Scalar> values) {
  std::array<double, 8> sums{};
  std::size_t i = 0;
  for (; i + sums.size() <= values.size(); i += sums.size()) {
    for (std::size_t lane = 0; lane < sums.size(); ++lane) {
      const auto x = static_cast<double>(values[i + lane]);
      sums[lane] += x * x;
    }
  }
  double total = 0;
  for (; i < values.size(); ++i) {
    total += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  }
  for (const double sum : sums) total += sum;
  return total;
}

template <typename Scalar>
double sum_of_squares(const at::Tensor& tensor) {
  return sum_of_squares(std::span<const Scalar>(tensor.const_data_ptr<Scalar>(),
                                                static_cast<std::size_t>(tensor.numel())));
}

}  // namespace

void update(LayerState& state, const AdamWOptions& options) {
  if (state.frozen) return;
  const at::NoGradGuard no_graph;
  ++state.optimizer_steps;
  update_group(parameters_that(state, true), state.optimizer_steps, options.weight_decay, options);
  update_group(parameters_that(state, false), state.optimizer_steps, 0, options);
  for (Parameter& parameter : state.parameters) {
    if (parameter.rounded.defined()) parameter.rounded.copy_(parameter.value);
  }
}

void zero_gradients(LayerState& state) {
  for (Parameter& parameter : state.parameters) {
    if (parameter.gradient.defined()) parameter.gradient.zero_();
  }
}

void scale_gradients(LayerState& state, double factor) {
  for (Parameter& parameter : state.parameters) {
    if (parameter.gradient.defined()) parameter.gradient.mul_(factor);
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
  return parameter.gradient.scalar_type() == at::kDouble
             ? sum_of_squares<double>(parameter.gradient)
             : sum_of_squares<float>(parameter.gradient);
}

double clip_factor(double total_norm, double max_norm) {
  if (max_norm == 0 || total_norm <= max_norm) return 1;
  return max_norm / total_norm;
}

}  // namespace dynmo::model
