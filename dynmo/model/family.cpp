// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/family_impl.h"

namespace dynmo::model {

ParameterSpec constant(std::string name, std::int64_t size, double value) {
  return {.name = std::move(name),
          .shape = {size},
          .init_std = 0,
          .mean = value,
          .weight_decay = false};
}

ParameterSpec matrix(std::string name, std::int64_t rows, std::int64_t columns, double init_std) {
  return {.name = std::move(name),
          .shape = {rows, columns},
          .init_std = init_std,
          .mean = 0,
          .weight_decay = true};
}

ParameterSpec block_matrix(std::string name, std::int64_t rows, std::int64_t columns,
                           double init_std) {
  ParameterSpec spec = matrix(std::move(name), rows, columns, init_std);
  spec.prunable = true;
  return spec;
}

ParameterSpec with_units(ParameterSpec spec, const UnitAxis& units) {
  spec.units = units;
  return spec;
}

double residual_init_std(double init_std, std::int64_t blocks) {
  return init_std / std::sqrt(2.0 * static_cast<double>(blocks));
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
  return parameter.starts_with("lm_head.weight") ? std::string(parameter)
                                                 : fmt::format("{}.{}", model, parameter);
}

}  // namespace dynmo::model
