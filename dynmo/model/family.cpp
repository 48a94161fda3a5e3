// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/family_impl.h"

namespace dynmo::model {

ParameterSpec constant(std::string name, std::int64_t size, double value) {
  return {.name = std::move(name), .shape = {size}, .deviation = 0, .mean = value, .decays = false};
}

ParameterSpec matrix(std::string name, std::int64_t rows, std::int64_t columns, double deviation) {
  return {.name = std::move(name),
          .shape = {rows, columns},
          .deviation = deviation,
          .mean = 0,
          .decays = true};
}

ParameterSpec block_matrix(std::string name, std::int64_t rows, std::int64_t columns,
                           double deviation) {
  ParameterSpec spec = matrix(std::move(name), rows, columns, deviation);
  spec.prunable = true;
  return spec;
}

double residual_deviation(double deviation, std::int64_t blocks) {
  return deviation / std::sqrt(2.0 * static_cast<double>(blocks));
}

Expected<void> check_positive(std::initializer_list<ConfigField> fields) {
  for (const auto& [field, value] : fields) {
    if (!(std::isfinite(value) && value > 0)) {
      return make_error(ErrorCode::kBadInput, "model.{} is {:g}, wanted above 0", field, value);
    }
  }
  return {};
}

Expected<void> check_heads(std::int64_t hidden, std::int64_t heads) {
  if (hidden % heads == 0) return {};
  return make_error(ErrorCode::kBadInput,
                    "model.hidden is {}, wanted a multiple of model.heads ({}), such as {}", hidden,
                    heads, (hidden / heads + 1) * heads);
}

Expected<void> check_dropout(double dropout) {
  if (dropout >= 0 && dropout < 1) return {};
  return make_error(ErrorCode::kBadInput, "model.dropout is {:g}, wanted 0 or more and less than 1",
                    dropout);
}

LayerId head_of(std::int64_t blocks) { return LayerId(static_cast<std::int32_t>(2 * blocks + 1)); }

std::string checkpoint_name(std::string_view model, std::string_view list, const Place& place,
                            std::string_view parameter) {
  if (place.block >= 0) return fmt::format("{}.{}.{}.{}", model, list, place.block, parameter);
  return parameter == "lm_head.weight" ? std::string(parameter)
                                       : fmt::format("{}.{}", model, parameter);
}

}  // namespace dynmo::model
