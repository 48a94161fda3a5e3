// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/decoder_shape.h"

#include <algorithm>
#include <string_view>

#include "dynmo/core/check.h"

namespace dynmo::cost {
namespace {

void set_if_0(std::int64_t& value, std::int64_t otherwise) {
  if (value == 0) value = otherwise;
}

std::int64_t rounded_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::int64_t intermediate_of(std::int64_t hidden, Architecture architecture) {
  switch (architecture) {
    case Architecture::kGpt:
      return 4 * hidden;
    case Architecture::kLlama:
      return rounded_up(hidden * 8 / 3, 256);
    case Architecture::kMixtral:
      return hidden * 7 / 2;
  }
  return 0;
}

}  // namespace

DecoderShape with_defaults(DecoderShape shape, Architecture architecture) {
  const bool gpt = architecture == Architecture::kGpt;
  const bool mixtral = architecture == Architecture::kMixtral;
  set_if_0(shape.heads, std::max<std::int64_t>(1, shape.hidden / (gpt ? 64 : 128)));
  set_if_0(shape.kv_heads, mixtral ? std::max<std::int64_t>(1, shape.heads / 4) : shape.heads);
  set_if_0(shape.intermediate, intermediate_of(shape.hidden, architecture));
  set_if_0(shape.vocabulary, gpt ? 50304 : 32000);
  set_if_0(shape.positions, shape.sequence);
  return shape;
}

Expected<void> validate(const DecoderShape& shape, const DecoderLimits& limits) {
  const struct {
    std::string_view key;
    std::int64_t value;
    std::int64_t max;
  } sizes[] = {{"vocabulary", shape.vocabulary, limits.tokens},
               {"hidden", shape.hidden, limits.hidden},
               {"blocks", shape.blocks, limits.blocks},
               {"heads", shape.heads, limits.hidden},
               {"kv_heads", shape.kv_heads, limits.hidden},
               {"intermediate", shape.intermediate, limits.intermediate},
               {"sequence", shape.sequence, limits.tokens}};
  for (const auto& [key, value, max] : sizes) {
    if (value >= 1 && value <= max) continue;
    return make_error(ErrorCode::kBadInput, "model.{} is {}, wanted 1 to {}", key, value, max);
  }
  if (shape.heads % shape.kv_heads != 0) {
    return make_error(ErrorCode::kBadInput,
                      "model.kv_heads is {}, wanted a divisor of model.heads ({})", shape.kv_heads,
                      shape.heads);
  }
  if (shape.positions != 0 && shape.positions < shape.sequence) {
    return make_error(ErrorCode::kBadInput,
                      "model.positions is {}, wanted at least model.sequence ({}), or 0",
                      shape.positions, shape.sequence);
  }
  if (shape.positions > limits.tokens) {
    return make_error(ErrorCode::kBadInput, "model.positions is {}, wanted at most {}",
                      shape.positions, limits.tokens);
  }
  const std::int64_t slices = std::max<std::int64_t>(1, shape.vocabulary / kSliceRows);
  if (shape.head_slices < 1 || shape.head_slices > slices) {
    return make_error(
        ErrorCode::kBadInput,
        "model.head_slices is {}, wanted 1 to {}: slices of at least {} of the {} words",
        shape.head_slices, slices, kSliceRows, shape.vocabulary);
  }
  return {};
}

HeadRows head_rows(std::int64_t vocabulary, std::int64_t slices, std::int64_t slice) {
  DYNMO_CHECK(slices >= 1 && slice >= 0 && slice < slices, "a slice of {}, got {}", slices, slice);
  const std::int64_t whole = vocabulary / kSliceRows;
  DYNMO_CHECK(slices <= std::max<std::int64_t>(1, whole),
              "{} words in slices of at least {}, got {}", vocabulary, kSliceRows, slices);
  return {.begin = whole * slice / slices * kSliceRows,
          .end = slice + 1 == slices ? vocabulary : whole * (slice + 1) / slices * kSliceRows};
}

}  // namespace dynmo::cost
