// SPDX-License-Identifier: Apache-2.0
#pragma once

// The common parts of decoder families: descriptions of parameters, checks of configs, and
// Hugging Face's names of the tensors of a list of blocks.

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/cost/decoder_shape.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/recipe.h"

namespace dynmo::model {

using Specs = std::vector<ParameterSpec>;

// Describes a vector that starts as `value` everywhere and does not decay: a norm's weight, a bias.
[[nodiscard]] ParameterSpec constant(std::string name, std::int64_t size, double value);
[[nodiscard]] ParameterSpec matrix(std::string name, std::int64_t rows, std::int64_t columns,
                                   double init_std);
// Describes a matrix inside a block, which may be pruned.
[[nodiscard]] ParameterSpec block_matrix(std::string name, std::int64_t rows, std::int64_t columns,
                                         double init_std);

// Returns `spec` with its `units` set.
[[nodiscard]] ParameterSpec with_units(ParameterSpec spec, const UnitAxis& units);

// Returns the standard deviation of the two projections into the residual stream (Radford et al.,
// 2019, section 2.3).
[[nodiscard]] double residual_init_std(double init_std, std::int64_t blocks);

struct ConfigField {
  std::string_view name;
  double value;
};
// Limits ten times above the largest models trained so far, so that a larger number is a mistake.
// Below them, planning a model takes seconds and little memory.
inline constexpr cost::DecoderLimits kDecoderLimits = {.hidden = std::int64_t{1} << 17,
                                                       .blocks = std::int64_t{1} << 12,
                                                       .intermediate = std::int64_t{1} << 20,
                                                       .tokens = std::int64_t{1} << 24};
inline constexpr std::int64_t kMaxAngles = std::int64_t{1} << 28;  // angles of rotary positions

// Checks that fields are above 0. Returns kBadInput with the key of a run's config.
[[nodiscard]] Expected<void> check_positive(std::initializer_list<ConfigField> fields);
// Checks that `heads` divides `hidden`. Returns kBadInput with the key of a run's config.
[[nodiscard]] Expected<void> check_heads(std::int64_t hidden, std::int64_t heads);
// Checks that a dropout is 0 or more and below 1. Returns kBadInput with the key of a run's config.
[[nodiscard]] Expected<void> check_dropout(double dropout);

// Returns the id of the head, after the embedding and two half blocks a block.
[[nodiscard]] LayerId head_of(std::int64_t blocks);

// Returns the full name of a parameter. With "model" and "layers", the name of "mlp.up_proj.weight"
// in block 1 is "model.layers.1.mlp.up_proj.weight". The head's matrix is outside of the model.
[[nodiscard]] std::string checkpoint_name(std::string_view model, std::string_view list,
                                          const Place& place, std::string_view parameter);

}  // namespace dynmo::model
